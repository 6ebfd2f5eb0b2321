"""The mixture of experts: every token reaches its experts, wherever the others go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.experts import mix_experts
from orbit_jax.model.layers import Module, linear
from orbit_jax.model.moe import moe, route
from orbit_jax.quant.qtensor import dequantize

EXACT = dataclasses.replace(toy.MOE, compute_dtype="float32", num_layers=1, sparse=(True,))
TOKENS = 40
X, DIRECTION = np.random.default_rng(0).standard_normal((2, TOKENS, EXACT.hidden_size), np.float32)
LAYER = np.int32(0)


@functools.cache
def weights() -> dict:
    return toy.make_base(EXACT)["layers"][0]["mlp"]


def model(normed: bool) -> ModelConfig:
    return dataclasses.replace(EXACT, expert_block=16, norm_topk_prob=normed)


def mlp(config: ModelConfig, weights: dict) -> Module:
    return Module(config, weights, LAYER, None)


@functools.cache
def program(normed: bool):
    """Jitted `(weights, x, valid) -> y, load`."""

    def run(weights: dict, x: jax.Array, valid: jax.Array):
        return moe(mlp(model(normed), weights), x, valid)

    return jax.jit(run)


@functools.cache
def wide_experts() -> dict[str, np.ndarray]:
    widen = jax.jit(dequantize, static_argnums=1)
    return {k: np.asarray(widen(q, jnp.float32)[0]) for k, q in weights()["experts"].items()}


def brute_force(config: ModelConfig, gate: np.ndarray, x: np.ndarray) -> tuple:
    """One token after another through its own experts, in f64."""
    out, load = np.zeros(x.shape), np.zeros(config.num_experts, int)
    experts = wide_experts()
    for n, row in enumerate(x.astype(np.float64)):
        scores = gate.astype(np.float64) @ row
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        chosen = sorted(range(config.num_experts), key=lambda e: (-probabilities[e], e))
        chosen = chosen[: config.top_k]
        total = probabilities[chosen].sum() if config.norm_topk_prob else 1.0
        for e in chosen:
            g, u = experts["gate_proj"][e] @ row, experts["up_proj"][e] @ row
            y = experts["down_proj"][e] @ (g / (1 + np.exp(-g)) * u)
            out[n] += probabilities[e] / total * y
            load[e] += 1
    return out, load


def plain_gate() -> np.ndarray:
    return np.asarray(jax.jit(dequantize, static_argnums=1)(weights()["gate"], jnp.float32)[0])


whether_normed = pytest.mark.parametrize("normed", [False, True])


@whether_normed
def test_outputs_are_those_of_a_loop_over_tokens(normed):
    y, load = program(normed)(weights(), X, np.ones(TOKENS, bool))
    expected, expected_load = brute_force(model(normed), plain_gate(), X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(load, expected_load)
    assert (load > 0).sum() > 4


@whether_normed
def test_no_token_is_dropped_when_all_choose_the_same_experts(normed):
    """A router of zeros: every expert is as likely, and ties go to the lowest index."""
    gate = jax.tree.map(np.zeros_like, weights()["gate"])
    y, load = program(normed)(weights() | {"gate": gate}, X, np.ones(TOKENS, bool))
    expected, _ = brute_force(model(normed), np.zeros((8, EXACT.hidden_size)), X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(load, [TOKENS, TOKENS, 0, 0, 0, 0, 0, 0])


@whether_normed
def test_padding_reaches_no_expert(normed):
    valid = np.arange(TOKENS) % 3 != 0
    spoilt = np.where(valid[:, None], X, np.nan).astype(np.float32)
    y, load = program(normed)(weights(), spoilt, valid)
    expected, expected_load = brute_force(model(normed), plain_gate(), X[valid])
    np.testing.assert_allclose(y[valid], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(load, expected_load)


def test_experts_come_in_ascending_order_with_their_weights():
    experts, mixing = jax.jit(lambda w, x: route(mlp(EXACT, w), x))(weights(), X)
    assert (np.diff(experts, axis=1) > 0).all()
    np.testing.assert_allclose(mixing.sum(axis=1), 1, rtol=1e-6)
    scores = X @ plain_gate().T
    heavier = np.take_along_axis(scores, np.asarray(experts), 1).argmax(axis=1)
    np.testing.assert_array_equal(heavier, mixing.argmax(axis=1))


def test_one_token_alone_has_the_bits_that_it_has_among_others():
    """In bf16, with the options of a run: the sums over choices do not depend on the company."""
    config = dataclasses.replace(EXACT, compute_dtype="bfloat16")
    run = toy.programs.jit(
        lambda weights, x, valid: moe(mlp(config, weights), x, valid)[0],
        toy.programs.options("fast"),
    )
    x = X.astype(jnp.bfloat16)
    together = np.asarray(run(weights(), x, np.ones(TOKENS, bool)))
    alone = run(weights(), x[7:8], np.ones(1, bool))
    np.testing.assert_array_equal(alone[0], together[7])
    mask = np.arange(TOKENS) >= 30
    np.testing.assert_array_equal(run(weights(), x, mask)[30:], together[30:])


def in_one_go(config: ModelConfig, weights: dict, adapter: Adapter | None, x: jax.Array):
    """All experts for all tokens, as a formula that autodiff differentiates."""
    experts, mixing = route(mlp(config, weights), x)
    total = jnp.zeros_like(x)
    for e in range(config.num_experts):
        own = jax.tree.map(lambda p, e=e: p[e], adapter) if adapter else None

        def project(name: str, x: jax.Array, e: int = e, own: Adapter | None = own) -> jax.Array:
            return linear(x, weights["experts"][name], (LAYER, e), own, name)

        y = project("down_proj", jax.nn.silu(project("gate_proj", x)) * project("up_proj", x))
        total += y * jnp.where(experts == e, mixing, 0.0).sum(axis=1, keepdims=True)
    return total


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("trained", [LoRA(8, 16.0), OFT(16), "weights"])
def test_the_backward_pass_is_that_of_the_formula(trained, remat):
    config = dataclasses.replace(model(True), remat=remat)
    held = weights()
    if trained != "weights":
        targets = ("experts.up_proj", "down_proj")
        adapter = toy.make_adapter(toy.make_base(EXACT), trained, targets)
        params = adapter.params["layers"][0]["mlp"]["experts"]
        adapter = adapter.replace(params=jax.tree.map(lambda p: p[0], params), path=("experts",))
    else:
        wide = jax.tree.map(jnp.asarray, wide_experts())
        adapter, held = None, held | {"experts": {k: w[None] for k, w in wide.items()}}

    def ours(moved, x):
        module = mlp(config, held if adapter else held | {"experts": moved})
        experts, mixing = route(module, x)
        module = module.below("experts")
        module = dataclasses.replace(module, adapter=moved.prepared() if adapter else None)
        return (mix_experts(module, x, experts, mixing) * DIRECTION).sum()

    def formula(moved, x):
        if adapter:
            return (in_one_go(config, held, moved.prepared(), x) * DIRECTION).sum()
        return (in_one_go(config, held | {"experts": moved}, None, x) * DIRECTION).sum()

    moved = adapter or held["experts"]
    x = jnp.asarray(X)
    found = jax.jit(jax.grad(ours, (0, 1)))(moved, x)
    expected = jax.jit(jax.grad(formula, (0, 1)))(moved, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize(
    ("method", "shared"),
    [(LoRA(4, 8.0), "a"), (LoRA(4, 8.0), "b"), (LoRA(4, 8.0), "ab"), (OFT(8), "a")],
)
def test_what_experts_share_acts_as_the_same_for_each_and_gets_the_sum_of_gradients(method, shared):
    config, held, x, apart = model(True), weights(), jnp.asarray(X), method
    method, shape = dataclasses.replace(method, shared=shared), held["experts"]["up_proj"].shape
    one = jax.tree.map(lambda p: p + 0.1, method.init(jax.random.key(0), shape))
    each = jax.tree.map(lambda p: jnp.broadcast_to(p, (1, 8, *p.shape[2:])), one)
    assert method.count(shape) == sum(p.size for p in jax.tree.leaves(one))
    assert method.count(shape) < apart.count(shape)

    @jax.jit
    def gradient(params: dict) -> tuple[jax.Array, dict]:
        def loss(params: dict) -> jax.Array:
            params = jax.tree.map(lambda p: p[0], {"up_proj": params})
            module = mlp(config, held)
            experts, mixing = route(module, x)
            adapter = Adapter(params, apart, path=("experts",)).prepared()
            module = dataclasses.replace(module.below("experts"), adapter=adapter)
            return (mix_experts(module, x, experts, mixing) * DIRECTION).sum()

        return jax.value_and_grad(loss)(params)

    (ours, found), (same, expected) = gradient(one), gradient(each)
    assert ours == same
    for name in expected:
        total = np.asarray(expected[name])
        total = total.sum(axis=1, keepdims=True) if found[name].shape[1] == 1 else total
        np.testing.assert_allclose(found[name], total, rtol=1e-3, atol=1e-4 * np.abs(total).max())
