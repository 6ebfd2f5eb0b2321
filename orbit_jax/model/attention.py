"""Grouped-query attention over keys and values laid out by (row, position).

One function serves decoding and training. Queries go in blocks, each with a plain f32 softmax over
all slots of its row, so that a query's numbers depend neither on its block nor on how many slots
lie unused behind it; an online softmax over key blocks would give other bits.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import Layout, Stream, regroup
from orbit_jax.quant.matmul import over_rows
from orbit_jax.quant.qtensor import round_to

_MAX_SCORE_BYTES = 64 << 20  # f32 scores that may exist at one time


@struct.dataclass
class Cache:
    """Keys and values of all layers, `[L, B, K, S, head_dim]` in the compute dtype."""

    keys: jax.Array
    values: jax.Array


def empty_cache(config: ModelConfig, num_rows: int, num_slots: int) -> Cache:
    """A cache of zeros (stale slots must stay finite: they are multiplied by a weight of 0)."""
    shape = (config.num_layers, num_rows, config.num_kv_heads, num_slots, config.head_dim)
    zeros = functools.partial(jnp.zeros, shape, config.compute_dtype)
    return Cache(zeros(), zeros())


def rope_angles(config: ModelConfig, stream: Stream) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[N, head_dim/2]` f32 from a table by position, made once on the host in f64."""
    half = config.head_dim // 2
    inverse = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(stream.num_slots)[:, None] * inverse
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    return jnp.take(cos, stream.positions, axis=0), jnp.take(sin, stream.positions, axis=0)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of f32 `x[N, heads, head_dim]`, halves paired (Hugging Face's order)."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def write(
    cache: Cache, layer: jax.Array, stream: Stream, keys: jax.Array, values: jax.Array
) -> Cache:
    """Puts `keys, values[N, K, head_dim]` at their (row, position); padding is dropped."""
    at = (layer, jnp.where(stream.valid, stream.rows, stream.num_rows), slice(None))
    return Cache(
        cache.keys.at[(*at, stream.positions)].set(keys, mode="drop"),
        cache.values.at[(*at, stream.positions)].set(values, mode="drop"),
    )


def by_slot(layout: Layout, stream: Stream, x: jax.Array) -> jax.Array:
    """`x[N, K, head_dim]` laid out as the cache does it: `[B, K, S, head_dim]`."""
    n, kv, dim = x.shape
    out = regroup(x.reshape(n * kv, dim), layout.token_of_slot, layout.slots_of_token)
    return out.reshape(stream.num_rows, kv, stream.num_slots, dim)


def attend_cached(
    config: ModelConfig, layout: Layout, q: jax.Array, cache: Cache, layer: jax.Array
) -> jax.Array:
    """`attend` over a layer of the cache, of which only what the longest row fills is read."""

    def over(window: int, q: jax.Array, cache: Cache) -> jax.Array:
        """Slots behind the window are empty for all rows: reading them would change no bit."""
        _, rows, heads, _, dim = cache.keys.shape
        size = (1, rows, heads, window, dim)
        held = (
            lax.dynamic_slice(c, (layer, 0, 0, 0, 0), size)[0] for c in (cache.keys, cache.values)
        )
        return attend(config, layout, q, *held, trained=False)

    windows = _windows(cache.keys.shape[3])
    if len(windows) == 1:
        return over(windows[0], q, cache)
    branch = jnp.searchsorted(jnp.array(windows), layout.slots_used)
    return lax.switch(branch, [functools.partial(over, w) for w in windows], q, cache)


def attend(
    config: ModelConfig,
    layout: Layout,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    trained: bool = True,
) -> jax.Array:
    """Causal attention of `q[N, H, head_dim]` over `keys, values[B, K, S, head_dim]`.

    Returns `[N, H*head_dim]`. Head h reads key/value head `h // (H/K)`. Scores are not kept for a
    backward pass, which makes them again; `trained` says whether there will be one.
    """
    n, heads, dim = q.shape
    kv = keys.shape[1]
    blocks, chunk = layout.query_positions.shape
    group = heads // kv
    decode = layout.row_of_block is None
    if decode:
        q = jnp.pad(
            q.reshape(n, kv, group, dim), ((0, 0), (0, 0), (0, (chunk - 1) * group), (0, 0))
        )
    else:
        q = regroup(q.reshape(n * kv, group * dim), layout.token_of_query, layout.query_of_token)
        q = q.reshape(blocks, kv, chunk * group, dim)

    at_once = 1 if config.tile else max(1, _MAX_SCORE_BYTES // (4 * heads * chunk * keys.shape[2]))
    if at_once < blocks and trained:
        # Each turn of the loop adds to the gradient of all keys: in f32, as bf16 would lose bits.
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)

    @jax.checkpoint
    def several(q: jax.Array, positions: jax.Array, rows: jax.Array, keys: jax.Array, values):
        own = (_of_rows(x, rows).astype(q.dtype) for x in (keys, values))
        return jax.vmap(_block)(q, *own, positions)

    if decode and at_once >= blocks:
        out = jax.vmap(_block)(q, keys, values, layout.query_positions)
    else:
        rows = jnp.arange(blocks) if decode else layout.row_of_block
        out = over_rows(
            lambda *part: several(*part, keys, values),
            at_once if at_once < blocks else 0,
            q,
            layout.query_positions,
            rows,
        )
    if decode:
        return out[:, :, :group].reshape(n, heads * dim)
    out = out.reshape(blocks * kv * chunk, group * dim)
    out = regroup(out, layout.query_of_token[:, 0], layout.token_of_query[:, None])
    return out.reshape(n, heads * dim)


@jax.custom_vjp
def _of_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """`x[rows]`, with the gradient of a row that several blocks read summed in f32."""
    return jnp.take(x, rows, axis=0, mode="clip")


def _of_rows_backward(residual: tuple, g: jax.Array) -> tuple:
    rows, like = residual
    total = jnp.zeros((len(like), *g.shape[1:]), jnp.float32)
    return total.at[rows].add(g.astype(jnp.float32)).astype(like.dtype), None


# An empty slice of x carries its dtype and number of rows to the backward pass.
_of_rows.defvjp(lambda x, rows: (_of_rows(x, rows), (rows, x[..., :0])), _of_rows_backward)


def _windows(num_slots: int) -> list[int]:
    """Numbers of slots that are compiled: powers of two from 64, and all."""
    short = itertools.takewhile(lambda w: w < num_slots, (64 << i for i in itertools.count()))
    return [*short, num_slots]


def _block(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """One block of queries `q[K, M, hd]` of one row over `keys, values[K, S, hd]`; M = C * H/K."""
    per_position = q.shape[1] // positions.shape[0]
    seen = jnp.arange(keys.shape[1]) <= jnp.repeat(positions, per_position)[:, None]  # [M, S]
    highest = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    batched = functools.partial(
        lax.dot_general, precision=highest, preferred_element_type=jnp.float32
    )
    scores = batched(q, keys, (((2,), (2,)), ((0,), (0,)))) * (q.shape[-1] ** -0.5)
    scores = jnp.where(seen, scores, -1e30)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = batched(round_to(weights, q.dtype), values, (((2,), (1,)), ((0,), (0,))))
    return round_to(out, q.dtype)
