"""Grouped-query attention over keys and values laid out by (row, position).

With latent attention the cached latents are keys and values at once, of one kv head.

One function serves decoding and training. Queries go in blocks, each with a plain f32 softmax over
all slots of its row, so that a query's numbers depend neither on its block nor on how many slots
lie unused behind it; an online softmax over key blocks would give other bits.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.stream import MIN_QUERY_ROWS, Layout, Stream, regroup
from orbit_jax.quant.matmul import over_rows
from orbit_jax.quant.qtensor import round_to

_MAX_SCORE_BYTES = 64 << 20  # f32 scores that may exist at one time
_MIN_WINDOW, _MOST_DOUBLINGS = 128, 3  # slots of the smallest window, and when they get fewer
_MIN_PART, _MAX_PARTS = 8, 4  # rows that decoding takes together, and how many such parts


@struct.dataclass
class Cache:
    """Keys and values of all layers, `[L, B, S, K, head_dim]` in the compute dtype.

    `values` is None where keys are the values too.
    """

    keys: jax.Array
    values: jax.Array | None


@struct.dataclass
class Scoring:
    """How scores become weights in one layer.

    Attributes:
      scale: static; what dot products are multiplied by.
      window: int32 scalar, positions that a query looks back over (its own counts), or None.
      sinks: `[H]` f32 logits that take part in the softmax and add nothing, or None.
    """

    scale: float = struct.field(pytree_node=False)
    window: jax.Array | None = None
    sinks: jax.Array | None = None


def empty_cache(config: ModelConfig, num_rows: int, num_slots: int) -> Cache:
    """A cache of zeros (stale slots must stay finite: they are multiplied by a weight of 0)."""
    shape = (config.num_layers, num_rows, num_slots, config.num_kv_heads, config.head_dim)
    zeros = functools.partial(jnp.zeros, shape, config.compute_dtype)
    return Cache(zeros(), None if config.latent else zeros())


def write(
    cache: Cache, layer: jax.Array, stream: Stream, keys: jax.Array, values: jax.Array | None
) -> Cache:
    """Puts `keys, values[N, K, head_dim]` at their (row, position); padding is dropped."""
    at = (layer, jnp.where(stream.valid, stream.rows, stream.num_rows), stream.positions)
    new = Cache(keys, values)
    return jax.tree.map(lambda held, x: held.at[at].set(x, mode="drop"), cache, new)


def by_slot(layout: Layout, stream: Stream, x: jax.Array) -> jax.Array:
    """`x[N, K, head_dim]` laid out for `attend`: `[B, K, S, head_dim]`."""
    n, kv, dim = x.shape
    out = regroup(x.reshape(n * kv, dim), layout.token_of_slot, layout.slots_of_token)
    return out.reshape(stream.num_rows, kv, stream.num_slots, dim)


def attend_cached(
    config: ModelConfig,
    layout: Layout,
    scoring: Scoring,
    q: jax.Array,
    cache: Cache,
    layer: jax.Array,
) -> jax.Array:
    """`attend` over a layer of the cache, of which only what the longest row fills is read.

    Decoding reads the stream's window, a prefill the first one of `cache_windows` that suffices.
    """

    def read(window: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        def row(held: jax.Array, b: jax.Array) -> jax.Array:
            size = (1, 1, window, *held.shape[3:])
            return lax.dynamic_slice(held, (layer, b, 0, 0, 0), size)[0, 0]

        held = jax.tree.map(lambda x: jax.vmap(functools.partial(row, x))(rows), cache)
        return held.keys, held.keys if held.values is None else held.values

    if layout.token_of_query is None:
        of_rows = functools.partial(read, layout.window)
        where = layout.row_of_block, layout.query_positions
        return _decode(scoring, q, *where, layout.window, of_rows)

    def over(window: int, q: jax.Array) -> jax.Array:
        own = (x.swapaxes(1, 2) for x in read(window, jnp.arange(cache.keys.shape[1])))
        # The barrier makes it a copy: a dot with a transposed operand has other bits.
        own = lax.optimization_barrier(tuple(own))
        return attend(config, layout, scoring, q, *own, trained=False)

    windows = cache_windows(cache.keys.shape[2])
    branch = jnp.searchsorted(jnp.array(windows), layout.slots_used)
    return lax.switch(branch, [functools.partial(over, w) for w in windows], q)


def cache_windows(num_slots: int) -> list[int]:
    """Numbers of first slots for which reading a cache is compiled: powers of two, and all.

    Slots behind a window are empty for all rows: reading them would change no bit. Of many slots
    fewer windows are compiled, powers of four, since each is a decoding loop of its own.
    """
    ratio = 2 if num_slots <= _MIN_WINDOW << _MOST_DOUBLINGS else 4
    windows = (_MIN_WINDOW * ratio**i for i in itertools.count())
    return [*itertools.takewhile(lambda w: w < num_slots, windows), num_slots]


def _decode(
    scoring: Scoring,
    q: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    window: int,
    read: Callable,
) -> jax.Array:
    """`attend` with one query `q[N, H, hd]` for each of N rows; `read(rows)` reads the cache.

    In parts: XLA:CPU runs a batch of dots on one core, and independent batches beside each other.
    """
    n, heads, _ = q.shape

    def part(q: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
        return _one_query(scoring, q, *read(rows), positions)

    size = max(_MIN_PART, -(-n // _MAX_PARTS))
    at_once = max(1, _MAX_SCORE_BYTES // (4 * heads * window))
    if at_once < size:
        return over_rows(part, at_once, q, rows, positions)
    starts = range(0, n, size)
    return jnp.concatenate([part(*(x[i : i + size] for x in (q, rows, positions))) for i in starts])


def _one_query(
    scoring: Scoring, q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """`q[N, H, hd]` of N rows over their `keys, values[N, S, K, hd]`: `[N, H*hd]`.

    All heads of a row in one dot, with queries that are zero at the other heads' places: exact, and
    cheaper than a dot for each kv head, whose few queries would have to be padded.
    """
    n, heads, dim = q.shape
    _, slots, kv, _ = keys.shape
    own = jnp.arange(heads)[:, None] // (heads // kv) == jnp.arange(kv)  # [H, K]
    wide = jnp.where(own[:, :, None], q[:, :, None, :], 0).reshape(n, heads, kv * dim)
    more = max(MIN_QUERY_ROWS - heads, 0)
    wide = jnp.pad(wide, ((0, 0), (0, more), (0, 0)))
    sinks = None if scoring.sinks is None else jnp.pad(scoring.sinks, (0, more))[:, None]
    keys, values = (x.reshape(n, slots, kv * dim) for x in (keys, values))
    seen = _seen(scoring, positions[:, :, None], slots)
    weights = _weights(_batched(wide, keys, (2, 2)) * scoring.scale, seen, sinks, q.dtype)
    out = _batched(weights, values, (2, 1))[:, :heads].reshape(n, kv, -1, kv, dim)
    out = jnp.stack([out[:, k, :, k] for k in range(kv)], axis=1)
    return round_to(out, q.dtype).reshape(n, heads * dim)


def attend(
    config: ModelConfig,
    layout: Layout,
    scoring: Scoring,
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
        return jax.vmap(functools.partial(_block, scoring))(q, *own, positions)

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


def _block(
    scoring: Scoring, q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """One block of queries `q[K, M, hd]` of one row over `keys, values[K, S, hd]`; M = C * H/K."""
    kv, rows, _ = q.shape
    chunk = positions.shape[0]
    sinks = scoring.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(kv, 1, -1), (1, chunk, 1)).reshape(kv, rows, 1)
    seen = _seen(scoring, jnp.repeat(positions, rows // chunk)[:, None], keys.shape[1])  # [M, S]
    weights = _weights(_batched(q, keys, (2, 2)) * scoring.scale, seen, sinks, q.dtype)
    return round_to(_batched(weights, values, (2, 1)), q.dtype)


def _seen(scoring: Scoring, positions: jax.Array, slots: int) -> jax.Array:
    """Which of the slots a query at each of `positions[..., 1]` sees: `[..., S]` bool."""
    slot = jnp.arange(slots)
    seen = slot <= positions
    return seen if scoring.window is None else seen & (slot > positions - scoring.window)


def _weights(
    scores: jax.Array, seen: jax.Array, sinks: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """Softmax over the last dimension of those scores that are seen, rounded to `dtype`."""
    scores = jnp.where(seen, scores, -1e30)
    top = scores.max(axis=-1, keepdims=True)
    top = lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    return round_to(weights / total, dtype)


def _batched(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product per index of the first dimension, contracted over `dims`, in f32."""
    highest = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((dims[0],), (dims[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, numbers, highest, preferred_element_type=jnp.float32)
