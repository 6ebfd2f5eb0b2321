"""Grouped-query attention over keys and values laid out by (row, position).

One function serves decoding and training. Queries go in blocks, each with a plain f32 softmax over
all slots of its row, so that a query's numbers depend neither on its block nor on how many slots
lie unused behind it; an online softmax over key blocks would give other bits.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import MIN_QUERY_ROWS, Layout, Stream, regroup
from orbit_jax.quant.matmul import over_rows
from orbit_jax.quant.qtensor import round_to

_MAX_SCORE_BYTES = 64 << 20  # f32 scores that may exist at one time
_MIN_PART, _MAX_PARTS = 8, 4  # rows that decoding takes together, and how many such parts


@struct.dataclass
class Cache:
    """Keys and values of all layers, `[L, B, S, K, head_dim]` in the compute dtype."""

    keys: jax.Array
    values: jax.Array


def empty_cache(config: ModelConfig, num_rows: int, num_slots: int) -> Cache:
    """A cache of zeros (stale slots must stay finite: they are multiplied by a weight of 0)."""
    shape = (config.num_layers, num_rows, num_slots, config.num_kv_heads, config.head_dim)
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
    at = (layer, jnp.where(stream.valid, stream.rows, stream.num_rows), stream.positions)
    return Cache(
        cache.keys.at[at].set(keys, mode="drop"), cache.values.at[at].set(values, mode="drop")
    )


def by_slot(layout: Layout, stream: Stream, x: jax.Array) -> jax.Array:
    """`x[N, K, head_dim]` laid out for `attend`: `[B, K, S, head_dim]`."""
    n, kv, dim = x.shape
    out = regroup(x.reshape(n * kv, dim), layout.token_of_slot, layout.slots_of_token)
    return out.reshape(stream.num_rows, kv, stream.num_slots, dim)


def attend_cached(
    config: ModelConfig, layout: Layout, q: jax.Array, cache: Cache, layer: jax.Array
) -> jax.Array:
    """`attend` over a layer of the cache, of which only what the longest row fills is read.

    Decoding reads the stream's window, a prefill the first one of `cache_windows` that suffices.
    """

    def read(window: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        def row(held: jax.Array, b: jax.Array) -> jax.Array:
            size = (1, 1, window, *held.shape[3:])
            return lax.dynamic_slice(held, (layer, b, 0, 0, 0), size)[0, 0]

        return tuple(jax.vmap(functools.partial(row, x))(rows) for x in (cache.keys, cache.values))

    if layout.token_of_query is None:
        of_rows = functools.partial(read, layout.window)
        return _decode(q, layout.row_of_block, layout.query_positions, layout.window, of_rows)

    def over(window: int, q: jax.Array) -> jax.Array:
        own = (x.swapaxes(1, 2) for x in read(window, jnp.arange(cache.keys.shape[1])))
        # The barrier makes it a copy: a dot with a transposed operand has other bits.
        return attend(config, layout, q, *lax.optimization_barrier(tuple(own)), trained=False)

    windows = cache_windows(cache.keys.shape[2])
    branch = jnp.searchsorted(jnp.array(windows), layout.slots_used)
    return lax.switch(branch, [functools.partial(over, w) for w in windows], q)


def cache_windows(num_slots: int) -> list[int]:
    """Numbers of first slots for which reading a cache is compiled: powers of two, and all.

    Slots behind a window are empty for all rows: reading them would change no bit.
    """
    short = itertools.takewhile(lambda w: w < num_slots, (128 << i for i in itertools.count()))
    return [*short, num_slots]


def _decode(
    q: jax.Array, rows: jax.Array, positions: jax.Array, window: int, read: Callable
) -> jax.Array:
    """`attend` with one query `q[N, H, hd]` for each of N rows; `read(rows)` reads the cache.

    In parts: XLA:CPU runs a batch of dots on one core, and independent batches beside each other.
    """
    n, heads, _ = q.shape

    def part(q: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
        return _one_query(q, *read(rows), positions)

    size = max(_MIN_PART, -(-n // _MAX_PARTS))
    at_once = max(1, _MAX_SCORE_BYTES // (4 * heads * window))
    if at_once < size:
        return over_rows(part, at_once, q, rows, positions)
    starts = range(0, n, size)
    return jnp.concatenate([part(*(x[i : i + size] for x in (q, rows, positions))) for i in starts])


def _one_query(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """`q[N, H, hd]` of N rows over their `keys, values[N, S, K, hd]`: `[N, H*hd]`.

    All heads of a row in one dot, with queries that are zero at the other heads' places: exact, and
    cheaper than a dot for each kv head, whose few queries would have to be padded.
    """
    n, heads, dim = q.shape
    _, slots, kv, _ = keys.shape
    own = jnp.arange(heads)[:, None] // (heads // kv) == jnp.arange(kv)  # [H, K]
    wide = jnp.where(own[:, :, None], q[:, :, None, :], 0).reshape(n, heads, kv * dim)
    wide = jnp.pad(wide, ((0, 0), (0, max(MIN_QUERY_ROWS - heads, 0)), (0, 0)))
    keys, values = (x.reshape(n, slots, kv * dim) for x in (keys, values))
    seen = jnp.arange(slots) <= positions[:, :, None]
    weights = _weights(_batched(wide, keys, (2, 2)) * (dim**-0.5), seen, q.dtype)
    out = _batched(weights, values, (2, 1))[:, :heads].reshape(n, kv, -1, kv, dim)
    out = jnp.stack([out[:, k, :, k] for k in range(kv)], axis=1)
    return round_to(out, q.dtype).reshape(n, heads * dim)


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

    out = over_rows(
        lambda *part: several(*part, keys, values),
        at_once if at_once < blocks else 0,
        q,
        layout.query_positions,
        layout.row_of_block,
    )
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


def _block(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """One block of queries `q[K, M, hd]` of one row over `keys, values[K, S, hd]`; M = C * H/K."""
    per_position = q.shape[1] // positions.shape[0]
    seen = jnp.arange(keys.shape[1]) <= jnp.repeat(positions, per_position)[:, None]  # [M, S]
    weights = _weights(_batched(q, keys, (2, 2)) * (q.shape[-1] ** -0.5), seen, q.dtype)
    return round_to(_batched(weights, values, (2, 1)), q.dtype)


def _weights(scores: jax.Array, seen: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Softmax over the last dimension of those scores that are seen, rounded to `dtype`."""
    scores = jnp.where(seen, scores, -1e30)
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return round_to(weights / weights.sum(axis=-1, keepdims=True), dtype)


def _batched(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product per index of the first dimension, contracted over `dims`, in f32."""
    highest = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((dims[0],), (dims[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, numbers, highest, preferred_element_type=jnp.float32)
