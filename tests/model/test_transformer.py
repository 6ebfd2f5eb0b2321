"""Log-probs and entropies of targets, a chunk of rows at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy

from orbit_jax.model.transformer import log_softmax_at, score


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


@functools.cache
def scored(head_chunk: int, untied: bool = False) -> tuple[np.ndarray, ...]:
    """Log-probs, entropies and the gradient to hidden states of 100 rows, in chunks."""
    config = dataclasses.replace(toy.DENSE, head_chunk=head_chunk, tie_word_embeddings=not untied)
    base = toy.make_base(config)
    head = {k: base[k] for k in ("embed_tokens", "lm_head") if k in base}
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((100, config.hidden_size), np.float32).astype(jnp.bfloat16)
    targets = rng.integers(0, config.vocab_size, 100).astype(np.int32)
    temperature = rng.uniform(0.5, 1.5, 100).astype(np.float32)

    def loss(hidden, base, targets, temperature):
        logprobs, entropy = score(config, base, hidden, targets, temperature)
        return logprobs.sum(), (logprobs, entropy)

    run = toy.programs.jit(jax.grad(loss, has_aux=True), toy.programs.options("fast"))
    gradient, (logprobs, entropy) = run(hidden, head, targets, temperature)
    return tuple(np.asarray(x, np.float32) for x in (logprobs, entropy, gradient))


def test_chunks_of_rows_change_nothing():
    for whole, parts in zip(scored(1024), scored(48), strict=True):
        np.testing.assert_array_equal(parts, whole)


def test_an_untied_head_is_read():
    tied, untied = scored(1024)[0], scored(1024, untied=True)[0]
    assert (tied != untied).all()
