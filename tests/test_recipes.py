"""The recipes of large models: what they say of themselves, and their forms at laptop size."""

import dataclasses
import importlib
import math

import jax
import pytest

from orbit_jax import mesh
from orbit_jax.adapters.adapter import attach
from orbit_jax.checkpoint.rehearsal import abstract_base
from orbit_jax.config import Config, from_config_dict
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.quant.qtensor import QTensor

# Published parameters, and the bytes of weights in the formats that models are deployed in.
PUBLISHED = {
    "kimi_k2": (1.03e12, 594e9),
    "deepseek_r1": (671e9, 673e9),  # without the layer that guesses further tokens
    "moe_1600b": (1.56e12, 836e9),  # nobody's: 1.6e12 with V4-Pro's own attention
    "qwen3_235b_a22b": (235e9, 236e9),
    "qwen3_30b_a3b": (30.5e9, 31.2e9),
    "gpt_oss_120b": (117e9, 65.2e9),
}
every_recipe = pytest.mark.parametrize("name", PUBLISHED)
is_weight = lambda node: isinstance(node, QTensor)  # noqa: E731


def recipe(name: str, variant: str = "") -> Config:
    return from_config_dict(importlib.import_module(f"configs.{name}").get_config(variant))


def parameters(base: dict) -> int:
    return sum(math.prod(w.shape) for w in jax.tree.leaves(base, is_leaf=is_weight))


@every_recipe
def test_a_recipe_has_the_published_size_and_trains_as_many_parameters_as_it_says(name: str):
    config = recipe(name)
    model, base = abstract_base(config.base.path)
    count, nbytes = PUBLISHED[name]
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(base))
    assert parameters(base) == pytest.approx(count, rel=5e-3)
    assert held == pytest.approx(nbytes, rel=5e-3)
    assert config.num_slots <= model.max_positions
    mesh.validate(dataclasses.replace(model, mesh=MeshShape(config.mesh.data, config.mesh.tensor)))

    adapter = config.adapter
    policy = jax.eval_shape(
        lambda key: attach(adapter.common, key, base, adapter.targets, adapter.overriding),
        jax.random.key(0),
    )
    trained = sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    assert f"Trains: {trained:,} parameters" in importlib.import_module(f"configs.{name}").__doc__
    assert trained / parameters(base) >= 3e-4


def traits(config: ModelConfig) -> tuple:
    """What makes a model of another kind, whatever its widths."""
    return (
        *(config.family, config.router, config.qk_norm, config.attention_bias, config.sinks),
        *(config.latent is None, bool(config.windows), config.rope.kind, config.expert_bias),
        *(config.norm_topk_prob, config.routed_scale, bool(config.shared_size)),
        *(config.num_groups, config.top_groups, config.swiglu_limit, config.rms_norm_eps),
        *([sparse for sparse, _ in config.stacks], config.tie_word_embeddings),
    )


def formats(base: dict) -> dict:
    kind = lambda w: (w.format, w.scale_dtype) if is_weight(w) else w.dtype.name  # noqa: E731
    return jax.tree.map(kind, base, is_leaf=is_weight)


@every_recipe
def test_the_tiny_form_has_the_structure_of_the_whole(name: str):
    (large, base), (small, shapes) = (
        abstract_base(recipe(name, variant).base.path) for variant in ("", "tiny")
    )
    assert traits(small) == traits(large)
    assert formats(shapes) == formats(base)
    for shape in ((1, 8), (2, 4), (4, 2), (8, 1)):
        mesh.validate(dataclasses.replace(small, mesh=MeshShape(*shape)))


@every_recipe
def test_the_forms_of_a_recipe_are_valid_and_others_are_refused(name: str):
    tiny, eight = recipe(name, "tiny"), recipe(name, "tiny8")
    assert tiny.base.weights == "random"
    assert tiny.base.path == f"configs/models/{name}_tiny"
    assert eight.mesh.simulate
    assert eight.mesh.data * eight.mesh.tensor == 8
    assert dataclasses.replace(eight, mesh=tiny.mesh) == tiny
    with pytest.raises(ValueError, match=f"{name} has no variant 'big': use tiny or tiny8"):
        recipe(name, "big")
