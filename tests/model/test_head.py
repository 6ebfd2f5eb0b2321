"""Log-probs and entropies of targets, a chunk of rows at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy
from numpy.testing import assert_array_equal as assert_same

from orbit_jax.model.head import log_softmax_at, score
from orbit_jax.quant.qtensor import dequantize


def test_temperature_divides_logits_and_is_an_array():
    logits = jnp.asarray([[2.0, 1.0, 0.0]] * 4)
    targets = jnp.asarray([0, 1, 2, 0])
    logprobs, entropy = log_softmax_at(logits, targets, jnp.asarray([0.5, 0.5, 0.5, 1.0]))
    np.testing.assert_allclose(logprobs, [-0.1429, -2.1429, -4.1429, -0.4076], atol=1e-4)
    p = np.exp([2.0, 1.0, 0.0])
    p /= p.sum()
    np.testing.assert_allclose(entropy[3], -(p * np.log(p)).sum(), rtol=1e-6)


def test_log_softmax_stays_finite_for_large_logits():
    logits = jnp.asarray([[1e4, 0.0, -1e4]])
    logprobs, entropy = log_softmax_at(logits, jnp.asarray([2]), jnp.ones(1))
    np.testing.assert_allclose(logprobs, [-2e4])
    np.testing.assert_allclose(entropy, [0.0], atol=1e-6)


def inputs(untied: bool = False) -> tuple:
    config = dataclasses.replace(toy.DENSE, tie_word_embeddings=not untied)
    base = toy.make_base(config)
    head = {k: base[k] for k in ("embed_tokens", "lm_head") if k in base}
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((100, config.hidden_size), np.float32).astype(jnp.bfloat16)
    targets = rng.integers(0, config.vocab_size, 100).astype(np.int32)
    temperature = rng.uniform(0.5, 1.5, 100).astype(np.float32)
    return config, head, hidden, targets, temperature


@functools.cache
def scored(
    head_chunk: int = 1024, untied: bool = False, weigh_entropy: float = 0.0, **given
) -> tuple[np.ndarray, ...]:
    """Log-probs, entropies and the gradient to hidden states of 100 rows, in chunks."""
    config, head, hidden, targets, temperature = inputs(untied)
    config = dataclasses.replace(config, head_chunk=head_chunk)
    weights = np.linspace(-1, 1, 100)  # a gradient of its own for each row
    if "places" in given:
        given["places"] = np.array(given["places"])

    def loss(hidden, head, targets, temperature):
        logprobs, entropy = score(config, head, hidden, targets, temperature, **given)
        total = (weights * logprobs).sum() + weigh_entropy * (weights * entropy).sum()
        return total, (logprobs, entropy)

    run = toy.programs.jit(jax.grad(loss, has_aux=True), toy.programs.options("fast"))
    gradient, (logprobs, entropy) = run(hidden, head, targets, temperature)
    return tuple(np.asarray(x, np.float32) for x in (logprobs, entropy, gradient))


def reference(weigh_entropy: float = 0.0) -> np.ndarray:
    """The gradient by autodiff, in f32."""
    _, head, hidden, targets, temperature = inputs()
    weight = jax.jit(dequantize, static_argnums=1)(head["embed_tokens"], jnp.float32)
    weights = np.linspace(-1, 1, 100)

    def loss(hidden):
        logits = jnp.matmul(hidden, weight.T, precision="highest")
        logprobs, entropy = log_softmax_at(logits, targets, temperature)
        return (weights * logprobs).sum() + weigh_entropy * (weights * entropy).sum()

    return np.asarray(jax.grad(loss)(hidden.astype(jnp.float32)))


def test_the_gradient_made_ahead_is_that_of_autodiff():
    np.testing.assert_allclose(scored()[2], reference(), atol=0.02 * np.abs(reference()).max())


def test_the_gradient_flows_through_entropies_only_when_asked():
    assert_same(scored(weigh_entropy=3.0)[2], scored()[2])
    wanted = reference(weigh_entropy=3.0)
    both = scored(weigh_entropy=3.0, entropy_gradient=True)[2]
    np.testing.assert_allclose(both, wanted, atol=0.02 * np.abs(wanted).max())
    assert_same(scored(entropy_gradient=True)[0], scored()[0])


def test_only_the_places_asked_for_are_scored():
    places = (5, 99, 0, 42, *[100] * 12)
    for some, everything in zip(scored(places=places), scored(), strict=True):
        kept = np.zeros_like(everything)
        kept[[5, 99, 0, 42]] = everything[[5, 99, 0, 42]]
        assert_same(some, kept)


def test_chunks_of_rows_change_nothing():
    for whole, parts in zip(scored(1024), scored(48), strict=True):
        assert_same(parts, whole)


def test_an_untied_head_is_read():
    tied, untied = scored(1024)[0], scored(1024, untied=True)[0]
    assert (tied != untied).all()
