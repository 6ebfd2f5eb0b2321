"""The mixture of experts: every token reaches its experts, wherever the others go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.layers import Module
from orbit_jax.model.moe import moe, route
from orbit_jax.quant.qtensor import dequantize

EXACT = dataclasses.replace(toy.MOE, compute_dtype="float32", num_layers=1, sparse=(True,))
TOKENS = 40
X = np.random.default_rng(0).standard_normal((TOKENS, EXACT.hidden_size), np.float32)
LAYER = np.int32(0)


@functools.cache
def weights() -> dict:
    return toy.make_base(EXACT)["layers"][0]["mlp"]


def model(decoding: bool) -> ModelConfig:
    """Two models, so that both ways of weighing choices go through both ways of taking blocks."""
    return dataclasses.replace(EXACT, expert_block=16, norm_topk_prob=decoding)


def mlp(config: ModelConfig, weights: dict) -> Module:
    return Module(config, weights, LAYER, None)


@functools.cache
def program(decoding: bool):
    """Jitted `(weights, x, valid) -> y, load`; decoding skips blocks without rows."""

    def run(weights: dict, x: jax.Array, valid: jax.Array):
        return moe(mlp(model(decoding), weights), x, valid, skip_unused=decoding)

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


training_and_decoding = pytest.mark.parametrize("decoding", [False, True])


@training_and_decoding
def test_outputs_are_those_of_a_loop_over_tokens(decoding):
    y, load = program(decoding)(weights(), X, np.ones(TOKENS, bool))
    expected, expected_load = brute_force(model(decoding), plain_gate(), X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(load, expected_load)
    assert (load > 0).sum() > 4


@training_and_decoding
def test_no_token_is_dropped_when_all_choose_the_same_experts(decoding):
    """A router of zeros: every expert is as likely, and ties go to the lowest index."""
    gate = jax.tree.map(np.zeros_like, weights()["gate"])
    y, load = program(decoding)(weights() | {"gate": gate}, X, np.ones(TOKENS, bool))
    expected, _ = brute_force(model(decoding), np.zeros((8, EXACT.hidden_size)), X)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(load, [TOKENS, TOKENS, 0, 0, 0, 0, 0, 0])


@training_and_decoding
def test_padding_reaches_no_expert(decoding):
    valid = np.arange(TOKENS) % 3 != 0
    spoilt = np.where(valid[:, None], X, np.nan).astype(np.float32)
    y, load = program(decoding)(weights(), spoilt, valid)
    expected, expected_load = brute_force(model(decoding), plain_gate(), X[valid])
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
        lambda weights, x, valid, skip: moe(mlp(config, weights), x, valid, skip_unused=skip)[0],
        toy.programs.options("fast"),
        static_argnames=("skip",),
    )
    x = X.astype(jnp.bfloat16)
    together = np.asarray(run(weights(), x, np.ones(TOKENS, bool), skip=False))
    alone = run(weights(), x[7:8], np.ones(1, bool), skip=True)
    np.testing.assert_array_equal(alone[0], together[7])
    mask = np.arange(TOKENS) >= 30
    np.testing.assert_array_equal(run(weights(), x, mask, skip=False)[30:], together[30:])
