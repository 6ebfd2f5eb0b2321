"""Adapters: where they attach, what they start as, and that each of their parts is felt."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rotation import Rotation

from orbit_jax.adapters.adapter import LINEAR_LAYERS, Method, attach, fingerprint, merge
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.model.layers import Module, linear
from orbit_jax.model.moe import moe
from orbit_jax.quant.qtensor import QTensor, dequantize

MIXED = dataclasses.replace(toy.MOE, num_layers=3, sparse=(False, True, True))


@functools.cache
def base(config=toy.MOE) -> dict:
    return toy.make_base(config)


@functools.cache
def rows() -> toy.Rows:
    return toy.Rows.draw(toy.MOE, 6, 64)


def logprobs(adapter) -> np.ndarray:
    stream, origin = rows().stream(size=6 * 64)
    run = toy.training_forward(toy.MOE)
    return toy.table(rows(), origin, run(base(), adapter, stream, rows().temperature(origin)))


@functools.cache
def gradient() -> dict:
    stream, origin = rows().stream(size=6 * 64)
    run = toy.training_gradient(toy.MOE, False)
    return run(base(), toy.make_adapter(base()), stream, rows().temperature(origin))[1]


def plain(tree: dict) -> dict:
    """The base with every packed weight as an ordinary f32 array."""

    def widen(node):
        return dequantize(node, jnp.float32) if isinstance(node, QTensor) else node

    is_packed = lambda node: isinstance(node, QTensor)  # noqa: E731
    return jax.jit(lambda tree: jax.tree.map(widen, tree, is_leaf=is_packed))(tree)


@pytest.mark.parametrize("rank", [4, 48])
def test_factors_are_drawn_as_they_are_called_and_none_changes_the_base(rank):
    draw = {
        name: LoRA(rank, 8.0, initialization=name).init(jax.random.key(0), (3, 5, 16, 32))
        for name in ("kaiming", "gaussian", "orthogonal")
    }
    assert all(params["a"].shape == (3, 5, rank, 32) for params in draw.values())
    assert not any(params["b"].any() for params in draw.values())
    uniform, normal, rows = (np.asarray(draw[name]["a"]) for name in draw)
    assert 0.99 / 32**0.5 < np.abs(uniform).max() <= 1 / 32**0.5
    np.testing.assert_allclose(normal.std(), 1 / rank, rtol=0.05)
    products = rows @ np.swapaxes(rows, -1, -2) if rank < 32 else np.swapaxes(rows, -1, -2) @ rows
    np.testing.assert_allclose(
        products, np.broadcast_to(np.eye(min(rank, 32)), products.shape), atol=1e-5
    )
    assert np.unique(rows.reshape(15, -1)[:, 0]).size == 15  # each matrix is its own


def test_how_a_factor_was_drawn_is_no_part_of_what_an_adapter_is():
    assert LoRA(4, 8.0) == LoRA(4, 8.0, initialization="gaussian")
    assert str(LoRA(4, 8.0)) == str(LoRA(4, 8.0, initialization="gaussian"))


def names(targets: tuple[str, ...], config=MIXED) -> list[set[str]]:
    """The adapted modules of each stack."""
    attached = jax.eval_shape(
        lambda base: attach(LoRA(2, 4.0), jax.random.key(0), base, targets), base(config)
    )
    paths = [jax.tree_util.tree_flatten_with_path(s)[0] for s in attached.params["layers"]]
    return [{".".join(k.key for k in path[:-1]) for path, _ in stack} for stack in paths]


ATTENTION = {f"self_attn.{n}_proj" for n in "qkvo"}


def test_every_linear_layer_is_adapted_by_default_and_the_router_is_not():
    parts = ("gate_proj", "up_proj", "down_proj")
    assert names(LINEAR_LAYERS) == [
        ATTENTION | {f"mlp.{p}" for p in parts},
        ATTENTION | {f"mlp.experts.{p}" for p in parts},
    ]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("gate_proj",), [{"mlp.gate_proj"}, {"mlp.experts.gate_proj"}]),
        (("mlp.gate_proj",), [{"mlp.gate_proj"}, set()]),
        (("experts.gate_proj",), [set(), {"mlp.experts.gate_proj"}]),
        (("q_proj", "self_attn.q_proj"), [{"self_attn.q_proj"}] * 2),
    ],
)
def test_a_target_is_matched_by_whole_names(targets, expected):
    assert names(targets) == expected


@pytest.mark.parametrize("target", ["gate", "mlp.gate"])
def test_the_router_is_refused(target):
    with pytest.raises(ValueError, match=r"names the router mlp\.gate: a router is never adapted"):
        names(("q_proj", target))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "q_pro"), r"\['q_pro'\] match no weight of this base"),
        (("proj",), "match no weight"),
        (("experts",), "match no weight"),
        (("mlp.gate_proj", "self_attn.gate_proj"), r"\['self_attn.gate_proj'\] match no weight"),
        (("lm_head",), "match no weight"),
        (("input_layernorm",), "not one of the linear layers"),
        ((), r"adapter\.targets is empty"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        names(targets)


def test_the_scale_is_alpha_over_rank():
    assert LoRA(rank=8, alpha=16.0).scale == 2.0
    assert LoRA(rank=8, alpha=16.0, rank_stabilized=True).scale == pytest.approx(5.657, abs=5e-4)
    params = {"a": jnp.asarray([[1.0, 2.0]]), "b": jnp.asarray([[1.0], [10.0], [0.0]])}
    x, y = jnp.asarray([[3.0, 4.0]]), jnp.asarray([[100.0, 200.0, 300.0]])
    out = LoRA(rank=1, alpha=2.0).output_side(params, x, y)
    np.testing.assert_array_equal(out, [[100 + 2 * 11, 200 + 2 * 110, 300]])


@pytest.mark.parametrize(
    "method",
    [LoRA(3, 6.0), Rotation(), OFT(4), OFT(2, block_share=True), OFT(4, shared="a")],
)
def test_count_is_the_number_of_parameters(method):
    shape = (2, 5, 12, 8)
    params = jax.eval_shape(lambda: method.init(jax.random.key(0), shape))
    assert sum(p.size for p in jax.tree.leaves(params)) == method.count(shape)
    assert isinstance(method, Method)


@pytest.mark.parametrize("method", [LoRA(8, 16.0), OFT(8)])
def test_a_fresh_adapter_is_the_base_bit_for_bit(method):
    fresh = jax.jit(lambda base: attach(method, jax.random.key(1), base))(base())
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(fresh.params))
    np.testing.assert_array_equal(logprobs(fresh), logprobs(None))


def test_a_changed_adapter_changes_the_output_and_nothing_is_traced_again():
    adapter = toy.make_adapter(base())
    before = logprobs(adapter)
    traces = toy.training_forward(toy.MOE).traces
    for name in ("q_proj", "o_proj"):
        for part in ("a", "b"):
            moved = jax.tree.map(np.array, adapter)
            moved.params["layers"][0]["self_attn"][name][part][0] += 0.05
            changed = logprobs(moved) != before
            assert changed[~np.isnan(before)].mean() > 0.5, (name, part)
    assert toy.training_forward(toy.MOE).traces == traces


def test_an_adapter_on_experts_alone_changes_the_output():
    """The same program reads it: everything else is left at zero."""
    adapter = toy.make_adapter(base())
    zero = jax.tree.map(np.zeros_like, adapter)
    experts = adapter.params["layers"][0]["mlp"]
    alone = zero.replace(params={"layers": [zero.params["layers"][0] | {"mlp": experts}]})
    changed = logprobs(alone) != logprobs(zero)
    assert changed[~np.isnan(logprobs(zero))].mean() > 0.5


def test_the_gradient_reaches_every_layer_and_expert_weight():
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient()):
        assert leaf.dtype == jnp.float32
        for layer in leaf:
            assert np.abs(layer).max() > 0, path


def test_the_gradient_equals_the_one_through_dequantised_weights():
    """Which are ordinary arrays, with layers computed again in the backward pass."""
    stream, origin = rows().stream(size=6 * 64)
    run = toy.training_gradient(dataclasses.replace(toy.MOE, remat=True), quick=True)
    args = (plain(base()), toy.make_adapter(base()), stream, rows().temperature(origin))
    for ours, reference in zip(
        jax.tree.leaves(gradient()), jax.tree.leaves(run(*args)[1]), strict=True
    ):
        assert np.abs(ours - reference).max() <= 2**-7 * np.abs(reference).max()


@pytest.mark.parametrize("method", [LoRA(4, 8.0), Rotation(), OFT(16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-6)])
def test_a_merged_weight_does_what_the_adapter_does(method, dtype, tolerance):
    adapter = toy.make_adapter(base(), method, ("o_proj",))
    packed = base()["layers"][0]["self_attn"]["o_proj"]
    params = jax.tree.map(lambda p: p[1], adapter.params["layers"][0]["self_attn"]["o_proj"])
    here = adapter.replace(params={"self_attn": {"o_proj": params}})
    x = np.random.default_rng(0).standard_normal((20, 128), np.float32).astype(dtype)

    @jax.jit
    def both(x, packed, here):
        adapted = linear(x, packed, (1,), here.prepared().below("self_attn"), "o_proj")
        weight = dequantize(packed, jnp.float32)[1]
        merged = method.merge(here.params["self_attn"]["o_proj"], weight).astype(dtype)
        return adapted, linear(x, merged[None], (0,), None, ""), linear(x, packed, (1,), None, "")

    adapted, merged, bare = (np.asarray(y, np.float32) for y in both(x, packed, here))
    size = np.abs(adapted).max()
    assert np.abs(adapted - merged).max() <= tolerance * size
    assert np.abs(adapted - bare).max() > 0.05 * size


def test_merging_a_tree_touches_adapted_weights_only():
    adapter = toy.make_adapter(base(), targets=("down_proj", "q_proj"))
    weights = plain(base())
    merged = jax.jit(merge)(adapter, weights)
    assert jax.tree.structure(merged) == jax.tree.structure(weights)
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(merged), strict=True
    ):
        adapted = path[-1].key in ("down_proj", "q_proj")
        assert bool((np.asarray(before) != np.asarray(after)).any()) == adapted, path


def test_the_fingerprint_shows_every_changed_bit_and_every_swap():
    rng = np.random.default_rng(0)
    tree = {"a": rng.standard_normal((3, 4, 5), np.float32), "b": np.ones((2, 30), np.float32)}
    tree["a"][0, 0, :4] = [1.0, 2.0, -1.0, 0.0]
    mark = jax.jit(fingerprint)
    seen = {int(mark(tree))}

    def changed(edit) -> None:
        other = jax.tree.map(np.copy, tree)
        edit(other)
        seen.add(int(mark(other)))

    for bit in range(32):
        changed(lambda t, bit=bit: flip(t["a"], (2, 1, 3), bit))
        changed(lambda t, bit=bit: flip(t["b"], (1, 7), bit))
    swaps = [(0, 1), (0, 2), (1, 2), (2, 3), (0, 40)]
    for i, j in swaps:
        changed(lambda t, i=i, j=j: swap(t["a"].reshape(-1), i, j))
    changed(lambda t: t.update(a=t["b"].reshape(3, 4, 5), b=t["a"].reshape(2, 30)))
    changed(lambda t: t["b"].__setitem__((0, 0), -1.0))
    changed(lambda t: t["b"].__setitem__((1, 29), -1.0))
    assert len(seen) == 1 + 2 * 32 + len(swaps) + 3


def flip(x: np.ndarray, at: tuple[int, ...], bit: int) -> None:
    x.view(np.uint32)[at] ^= np.uint32(1 << bit)


def swap(x: np.ndarray, i: int, j: int) -> None:
    x[[i, j]] = x[[j, i]]


# A method of one's own: nothing in the package knows of it.

ROTATED = ("q_proj", "down_proj")


@functools.cache
def rotated(config):
    """An adapter that mixes the inputs of an attention and of a feed-forward weight."""
    adapter = toy.make_adapter(base(config), Rotation(), ROTATED, size=0.05)
    return jax.tree.map(lambda p: p + np.eye(p.shape[-1], dtype=np.float32), adapter)


def test_a_rotation_from_outside_works_on_experts():
    mlp = rotated(toy.MOE).params["layers"][0]["mlp"]
    layer = jax.tree.map(lambda p: p[1], rotated(toy.MOE).replace(params=mlp))
    still = jax.tree.map(lambda p: np.broadcast_to(np.eye(64, dtype=np.float32), p.shape), layer)
    x = np.random.default_rng(0).standard_normal((20, 64), np.float32).astype(jnp.bfloat16)

    @jax.jit
    def run(weights, adapter):
        return moe(Module(toy.MOE, weights, 1, adapter), x, jnp.ones(20, bool))[0]

    weights = base()["layers"][0]["mlp"]
    bare, unmoved, moved = (np.asarray(run(weights, a)) for a in (None, still, layer))
    np.testing.assert_array_equal(unmoved, bare)
    assert (moved != bare).mean() > 0.9


def test_a_rotation_from_outside_keeps_decoding_equal_to_training_and_gets_its_gradient():
    model, adapter = toy.DENSE, rotated(toy.DENSE)
    stream, origin = rows().stream(size=6 * 64)
    run = toy.training_gradient(model, False)
    trained, grads = run(base(model), adapter, stream, rows().temperature(origin))
    decoded = toy.cached_table(model, base(model), adapter, rows(), [9, 0, 1, 30, 2, 5])
    assert toy.largest_gap(toy.table(rows(), origin, trained), decoded) == 0.0
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf[0]).max() > 0
