"""Methods of their own for some weights: one adapter, several ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import LINEAR_LAYERS, attach, merge
from orbit_jax.adapters.lora import LoRA

COMMON, EXPERTS, DOWN = LoRA(4, 8.0), LoRA(2, 2.0), LoRA(1, 5.0, rank_stabilized=True)
OVERRIDES = (("experts.up_proj", EXPERTS), ("experts.down_proj", EXPERTS), ("down_proj", DOWN))
TARGETS = ("q_proj", "up_proj", "down_proj")


@functools.cache
def base() -> dict:
    return toy.make_base(toy.MOE)


def adapter():
    shapes = jax.eval_shape(
        lambda base: attach(COMMON, jax.random.key(0), base, TARGETS, OVERRIDES), base()
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), shapes)


def test_the_last_override_that_names_a_weight_wins():
    made = adapter()
    layers = made.replace(params=made.params["layers"][0])
    assert layers.method_at("self_attn", "q_proj") == COMMON
    assert layers.method_at("mlp", "experts", "up_proj") == EXPERTS
    assert layers.method_at("mlp", "experts", "down_proj") == DOWN
    ranks = {name: p["a"].shape[-2] for name, p in layers.params["mlp"]["experts"].items()}
    assert ranks == {"up_proj": 2, "down_proj": 1}
    assert layers.params["self_attn"]["q_proj"]["a"].shape[-2] == 4


def test_an_override_is_matched_by_whole_names():
    made = adapter().replace(overrides=(("q_proj", DOWN), ("self_attn.k_proj", EXPERTS)))
    assert made.method_at("self_attn", "q_proj") == DOWN
    assert made.method_at("self_attn", "xq_proj") == COMMON
    assert made.method_at("self_attn", "k_proj") == EXPERTS
    assert made.method_at("k_proj") == COMMON


def test_below_goes_down_to_what_is_attached_and_remembers_where_it_is():
    made = adapter()
    layers = made.replace(params=made.params["layers"][0])
    experts = layers.below("mlp").below("experts")
    assert experts.path == ("mlp", "experts")
    assert experts.method_at("up_proj") == EXPERTS
    up = layers.below("mlp", "experts", "up_proj")
    assert set(up.params) == {"a", "b"}
    assert up.method_at() == EXPERTS
    assert layers.below("mlp", "experts", "gate_proj") is None
    assert layers.below("self_attn", "k_proj") is None


@pytest.mark.parametrize("target", ["experts.gate_proj", "gate", "mlp.up_proj", "q_pro"])
def test_an_override_that_names_no_adapted_weight_is_refused(target):
    with pytest.raises(ValueError, match=rf"adapter\.overrides: \['{target}'\] match no adapted"):
        attach(COMMON, jax.random.key(0), base(), TARGETS, ((target, DOWN),))


def test_merging_follows_the_overrides():
    made = adapter()
    zeros = jax.tree.map(
        lambda w: np.zeros(w.shape, np.float32), base(), is_leaf=lambda w: hasattr(w, "shape")
    )
    merged = jax.jit(merge)(made, zeros)["layers"][0]
    params = made.params["layers"][0]
    for path, scale in ((("mlp", "experts", "down_proj"), 5.0), (("self_attn", "q_proj"), 2.0)):
        p, w = params, merged
        for name in path:
            p, w = p[name], w[name]
        np.testing.assert_allclose(w, scale * (p["b"] @ p["a"]), rtol=1e-4, atol=1e-4)


def test_partition_rules_ask_each_weights_own_method():
    class Whole(LoRA):
        def partition(self, spec):
            return {"a": P(), "b": P()}

    made = adapter().replace(overrides=(("q_proj", Whole(4, 8.0)),))
    specs = mesh.adapter_specs(made).params["layers"][0]
    assert specs["self_attn"]["q_proj"] == {"a": P(), "b": P()}
    assert specs["mlp"]["experts"]["up_proj"]["b"] == P(None, ("data", "tensor"), None, None)


def test_the_default_targets_are_the_linear_layers_that_the_base_has():
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} < set(LINEAR_LAYERS)
    default = jax.eval_shape(lambda base: attach(COMMON, jax.random.key(0), base), base())
    assert set(default.params["layers"][0]["self_attn"]) == {f"{n}_proj" for n in "qkvo"}
    with pytest.raises(ValueError, match=r"\['kv_b_proj'\] match no weight"):
        attach(COMMON, jax.random.key(0), base(), ("q_proj", "kv_b_proj"))


def test_a_transposed_update_is_that_of_the_transposed_weight():
    params = adapter().params["layers"][0]["mlp"]["experts"]["up_proj"]
    params = jax.tree.map(lambda p: np.asarray(p)[0, 0], params)
    out, width = len(params["b"]), params["a"].shape[-1]
    update = EXPERTS.merge(params, np.zeros((out, width), np.float32))
    x = np.random.default_rng(0).standard_normal((5, out), np.float32)
    y = np.ones((5, width), np.float32)
    moved = EXPERTS.output_side_transposed(params, x, y)
    np.testing.assert_allclose(moved, y + x @ update, rtol=1e-5, atol=1e-5)
