"""Drawing tokens: from hidden states to the next token of each row and its log-prob."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.exchange import gather_tokens
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import log_softmax_at, logits, own_tokens, temper
from orbit_jax.quant.matmul import over_rows

_BLOCK = 256  # of the vocabulary, about the square root of a large one


def row_keys(noise_ids: jax.Array) -> jax.Array:
    """Key data [B, 2] of each row's noise, from (seed, step, prompt, sample) alone."""

    def key(ids: jax.Array) -> jax.Array:
        folded = functools.reduce(jax.random.fold_in, ids[1:], jax.random.key(ids[0]))
        return jax.random.key_data(folded)

    return jax.vmap(key)(noise_ids)


def draw(
    config: ModelConfig, filters: bool, base: dict, hidden: jax.Array, *rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws the tokens [N] that follow `hidden[N, D]`; returns them and their log-probs.

    `rows` are arrays [N, ...]: keys, positions of the drawn tokens, temperature, top_k, top_p.
    """

    def some(hidden: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
        drawn = _draw_rows(filters, logits(config, base, hidden), *own_tokens(config, *rows))
        return tuple(gather_tokens(config.mesh, x) for x in drawn)

    return over_rows(some, config.tile, hidden, *rows)


def _draw_rows(
    filters: bool,
    raw: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    greedy = temperature <= 0
    scale = jnp.where(greedy, 1.0, temperature)
    scores = temper(raw, scale)
    if filters:
        scores = jnp.where(_kept(scores, top_k, top_p), scores, -jnp.inf)

    def noise(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
        return jax.random.uniform(key, (2,))

    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    drawn = _pick(weights, jax.vmap(noise)(keys, positions))
    token = lax.cond(
        greedy.any(), lambda s, d: jnp.where(greedy, _highest(s), d), lambda s, d: d, scores, drawn
    )
    return token, log_softmax_at(raw, token, scale)[0]


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws an index with probability proportional to `weights[N, V]`, from `uniform[N, 2]`.

    First a block of the vocabulary, then a place in it: two random numbers a token, where noise on
    every logit would need V of them (a quarter of the time of a decode step), and sums short enough
    that f32 does not lose unlikely tokens.
    """
    blocks = _in_blocks(weights, 0.0)
    block = _invert(blocks.sum(axis=-1), uniform[:, 0])
    return block * _BLOCK + _invert(_block_at(blocks, block), uniform[:, 1])


def _highest(scores: jax.Array) -> jax.Array:
    """The first index of the highest of `scores[N, V]`, [N] int32.

    By blocks as well: an argmax over all of it takes as long as the head's matmul.
    """
    blocks = _in_blocks(scores, -jnp.inf)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    return block * _BLOCK + jnp.argmax(_block_at(blocks, block), axis=-1)


def _in_blocks(x: jax.Array, filler: float) -> jax.Array:
    """`[N, V]` as `[N, blocks, _BLOCK]`."""
    n, v = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -v % _BLOCK)), constant_values=filler)
    return padded.reshape(n, -1, _BLOCK)


def _block_at(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block `index[n]` of each row."""
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The place in `weights[N, M]` at which their running sum passes a share `uniform[N]` of it.

    It has a weight, as `uniform` is at most 1 - 2^-23, whose product with a sum stays below it.
    """
    total = jnp.cumsum(weights, axis=1)
    return jnp.argmax(total > (uniform * total[:, -1])[:, None], axis=1)


def _kept(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """[N, V] bool: the top_k highest, and the fewest highest whose probability reaches top_p.

    Scores equal to the lowest one kept are kept as well.
    """
    ranked = jnp.sort(scores, axis=-1, descending=True)
    k = jnp.where(top_k > 0, top_k, scores.shape[-1]).clip(max=scores.shape[-1])
    kth = jnp.take_along_axis(ranked, k[:, None] - 1, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(ranked >= kth, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    lowest = jnp.where(before < top_p[:, None], ranked, ranked[:, :1]).min(axis=-1, keepdims=True)
    return scores >= jnp.maximum(kth, lowest)
