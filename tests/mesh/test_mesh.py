"""The same program on one device and on eight simulated ones, and what a mesh refuses."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import is_named
from orbit_jax.model.config import MeshShape
from orbit_jax.model.weights import weights
from orbit_jax.quant.qtensor import from_float


@pytest.mark.parametrize(
    "way",
    [
        "moe 8x1",
        "moe 1x8",
        "moe 1x1 under a gradient",
        "moe 2x4 under a gradient",
        "moe 2x4 decoded",
        "moe 2x4 decoded from a working copy",
        "dense 2x4",
        "dense 2x4 decoded",
        "latent 2x4 decoded",
        "latent 2x4 under a gradient",
        "sinks 2x4 decoded",
        "sinks 2x4 under a gradient",
        "rotated 2x4 decoded",
        "rotated 2x4 under a gradient",
    ],
)
def test_logprobs_on_eight_devices_are_those_of_one(way, eight_devices):
    assert eight_devices["spread"] > 1
    assert eight_devices[way] == 0.0


def test_sampler_and_step_agree_on_eight_devices_whatever_the_micro_batches(eight_devices):
    one, other = eight_devices["steps 8x1"], eight_devices["steps 2x4"]
    assert [*one["gap"], *other["gap"]] == [0.0, 0.0, 0.0]
    assert eight_devices["rotated steps 2x4"]["gap"] == [0.0]


def test_what_a_step_returns_lies_as_the_sampler_and_the_next_step_take_it(eight_devices):
    assert eight_devices["steps 8x1"]["resharded"] == [0]
    assert eight_devices["steps 2x4"]["resharded"] == [0, 0]
    assert eight_devices["rotated steps 2x4"]["resharded"] == [0]


def test_a_step_tells_what_a_device_sent_for_adapters(eight_devices):
    """Dense weights' factors of rank 4, by hand: gathered in bf16 once to sample, in f32 once for
    each micro-batch, and their gradients scattered as often. A lies over all eight devices; of B a
    device reads the outputs of its tensor rank, half of which its peer in `data` has."""
    inputs, outputs = 64 + 64 + 64 + 128, 128 + 64 + 64 + 64
    layers, f32 = 2, 4
    once = layers * 4 * f32 * (inputs * 7 / 8 + outputs / 4 / 2)
    steps = eight_devices["steps 2x4"]
    found = [sent["traffic/adapter_mb"] for sent in steps["sent"]]
    np.testing.assert_allclose(found, [(0.5 + 2) * once / 1e6, (0.5 + 4 * 2) * once / 1e6])
    assert all(sent["traffic/routing_mb"] > 1 for sent in steps["sent"])
    assert eight_devices["steps 8x1"]["sent"][0]["traffic/dense_mb"] == 0
    turns, longest = steps["turns"]
    assert turns == longest > 1


def test_loss_and_gradient_are_means_over_tokens_for_every_split(eight_devices):
    """Over 8 or 2 shards, in 1 or 4 micro-batches: not the mean of their means."""
    one, other = eight_devices["steps 8x1"], eight_devices["steps 2x4"]
    losses, norms = [*one["loss"], *other["loss"]], [*one["gradient"], *other["gradient"]]
    assert abs(losses[0]) > 1e-4
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-2)


def test_the_gradient_on_eight_devices_is_that_of_one_up_to_the_order_of_sums(eight_devices):
    assert 0 < eight_devices["gradient error"] < 2e-2


def test_each_device_holds_its_share(eight_devices):
    assert eight_devices["shares"] == {
        "experts": 1 / 8,
        "expert adapters": 1 / 8,
        "attention": 1 / 4,
        "router": 1 / 4,
    }


def test_every_weight_has_a_rule():
    base = jax.eval_shape(lambda: toy.make_base(toy.MOE))
    specs = mesh.base_specs(base)["layers"][0]
    assert specs["mlp"]["experts"]["up_proj"].scales == P(None, ("data", "tensor"), None, None)
    assert specs["self_attn"]["o_proj"].codes == P(None, "tensor", None)
    assert specs["mlp"]["gate"].codes == P(None, "tensor", None)
    assert specs["input_layernorm"] == P()
    specs = mesh.base_specs(jax.eval_shape(lambda: toy.make_base(toy.LATENT)))["layers"][1]
    assert specs["self_attn"]["kv_b_proj"].codes == P(None, "tensor", None)
    assert specs["mlp"]["shared_experts"]["up_proj"].codes == P(None, "tensor", None)
    specs = mesh.base_specs(jax.eval_shape(lambda: toy.make_base(toy.SINKS)))["layers"][0]
    assert specs["self_attn"]["q_proj_bias"] == P(None, "tensor")
    assert specs["mlp"]["experts"]["up_proj_bias"] == P(None, ("data", "tensor"), None)


def test_every_rule_is_of_some_weight():
    """A rule that matches nothing would be a name misspelt."""
    families = (toy.MOE, toy.DENSE, toy.LATENT, dataclasses.replace(toy.SINKS, qk_norm="head"))
    paths = {
        tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        for config in families
        for path, _ in jax.tree_util.tree_leaves_with_path(weights(config))
    }
    matched = [
        next(n for names, _ in mesh.RULES for n in names if is_named(n, p))
        for p in paths
        if not p[-1].endswith("_bias") or p[-1] in ("gate_bias", "e_score_correction_bias")
    ]
    assert {name for names, _ in mesh.RULES for name in names} == set(matched)


def test_the_rule_of_the_router_is_not_that_of_gate_proj():
    assert mesh.weight_spec(("mlp", "gate")) == P(None, "tensor", None)
    experts = P(None, ("data", "tensor"), None, None)
    assert mesh.weight_spec(("mlp", "experts", "gate_proj")) == experts
    assert mesh.weight_spec(("mlp", "experts", "gate_proj_bias")) == P(*experts[:-1])
    assert mesh.weight_spec(("mlp", "gate_bias")) == P()


@pytest.mark.parametrize("name", ["bias", "gate_proj_2", "wq"])
def test_a_weight_without_a_rule_is_refused(name):
    weight = from_float(np.zeros((1, 4, 4), np.float32))
    base = {"layers": [{"mlp": {name: weight}}]}
    with pytest.raises(ValueError, match=rf"no partition rule matches the weight .*mlp.{name}"):
        mesh.base_specs(base)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((1, 8), {"hidden_size": 60}, r"mesh\.tensor=8 does not divide hidden_size=60"),
        ((1, 3), {"num_experts": 9}, r"mesh\.tensor=3 does not divide hidden_size=64"),
        ((2, 4), {"num_experts": 12}, r"mesh=2x4 does not divide num_experts=12"),
        (
            (1, 8),
            {"num_kv_heads": 1, "head_dim": 36},
            r"mesh\.tensor=8 does not divide num_kv_heads \* head_dim=36",
        ),
        (
            (1, 4),
            {"sparse": (False, True), "intermediate_size": 90},
            r"mesh\.tensor=4 does not divide intermediate_size=90",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(shape, changes, message):
    config = dataclasses.replace(toy.MOE, mesh=MeshShape(*shape), **changes)
    with pytest.raises(ValueError, match=message):
        mesh.validate(config)


def test_what_does_not_matter_is_not_refused():
    mesh.validate(dataclasses.replace(toy.MOE, mesh=MeshShape(2, 4), intermediate_size=90))
    mesh.validate(dataclasses.replace(toy.DENSE, mesh=MeshShape(8, 1), num_experts=3))


def test_more_devices_than_there_are_is_refused():
    count = len(jax.devices())
    with pytest.raises(ValueError, match=rf"this machine has {count}: set mesh\.data and mesh"):
        mesh.build(MeshShape(count + 1, 1))
