"""Tokens travel as one flat stream: N valid tokens, each with its row and its position in that row.

Decode (one token a row), prefill (some tokens of some rows) and training (all tokens of all rows)
are the same call on another stream, and padding costs nothing in the row-wise work. Only attention
sees rows. This file turns rows and positions into the few index arrays that attention needs, once
per forward pass.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax.model.config import ModelConfig

MIN_QUERY_ROWS = 8  # attention's dots have fewer rows than the kernels are stable for
_MIN_BLOCK = 16  # queries of a row that are taken together, and what larger blocks are multiples of


@struct.dataclass
class Stream:
    """N tokens in any order.

    Attributes:
      tokens: [N] int32.
      rows: [N] int32 in [0, B); B or more marks padding, which nothing sees.
      positions: [N] int32 in [0, S); the tokens of a row have consecutive positions.
      num_rows: B, static.
      num_slots: S, static: positions for which keys and values are kept.
      decode: static; no row has more than one token, and the cache has those before it.
      window: static, in decode: no row has a token at or behind this slot; 0 for S.
      prefix: [B] int32 or None. The tokens of row b that are not in the stream, those before its
        first, are those of row `prefix[b]`: a group's prompt goes through the model once. A row
        that shares nothing names itself; one that is shared from does so too.
      max_sharers: static, the most rows that name one other row in `prefix`.
    """

    tokens: jax.Array
    rows: jax.Array
    positions: jax.Array
    num_rows: int = struct.field(pytree_node=False)
    num_slots: int = struct.field(pytree_node=False)
    decode: bool = struct.field(pytree_node=False, default=False)
    window: int = struct.field(pytree_node=False, default=0)
    prefix: jax.Array | None = None
    max_sharers: int = struct.field(pytree_node=False, default=0)

    @property
    def valid(self) -> jax.Array:
        """[N] bool, false at padding."""
        return (self.rows >= 0) & (self.rows < self.num_rows)


@struct.dataclass
class Layout:
    """Index arrays between the stream and attention's slots and blocks, for K kv heads.

    They move rows of one (token, kv head), so that keys come out as `[B, K, S, ...]` and queries as
    `[blocks, K, C, ...]` without a transpose: XLA:CPU widens a bf16 dot to f32, with another order
    of summation, when one of its operands is transposed. Below, N is the number of tokens with
    keys and Q of those with queries.

    Attributes:
      token_of_slot: [B*K*S] index n*K + k of each slot's token and head, N*K where there is none.
        It and the next three are None where each token is a block of its own, in decoding.
      slots_of_token: [N*K, 1 + max_sharers] the inverse: places in all rows that read the token.
      token_of_query: [blocks*K*C] the same for the query places: q*K + k, Q*K for none.
      query_of_token: [Q*K, 1] the inverse.
      row_of_block: [blocks] the row whose queries a block holds.
      query_positions: [blocks, C], 0 where there is no query.
      slots_used: scalar, slots up to and including the last that any token of the stream sees.
      window: static, at least `slots_used`.
    """

    token_of_slot: jax.Array | None
    slots_of_token: jax.Array | None
    token_of_query: jax.Array | None
    query_of_token: jax.Array | None
    row_of_block: jax.Array
    query_positions: jax.Array
    slots_used: jax.Array
    window: int = struct.field(pytree_node=False)


def lay_out(config: ModelConfig, keyed: Stream, queries: Stream) -> Layout:
    """Computes the index arrays of the tokens that have keys, and of those that attend to them.

    These are the same, or some of the same rows. Queries of one row are taken in blocks of C that
    are short against a row, as each row's last one is part empty. Decoding needs no blocks, unless
    by tiles, which are to be the same everywhere.
    """
    n, b, s = queries.tokens.shape[0], queries.num_rows, queries.num_slots
    valid, positions, kv_heads = queries.valid, queries.positions, config.num_kv_heads
    used = jnp.where(valid, positions + 1, 0).max()
    if queries.decode and not config.tile:
        rows = jnp.where(valid, queries.rows, 0)
        return Layout(None, None, None, None, rows, positions[:, None], used, queries.window or s)
    if config.tile:
        smallest = math.ceil(MIN_QUERY_ROWS / config.queries_per_kv)
        chunk = max(smallest, config.tile // config.queries_per_kv)
    else:
        chunk = max(_MIN_BLOCK, min(config.query_chunk, s // 8 // _MIN_BLOCK * _MIN_BLOCK))
    token_of_slot, slots_of_token = _slots(keyed, kv_heads)
    row, first = jnp.where(valid, queries.rows, b), _first_positions(queries)
    count = jax.ops.segment_sum(jnp.ones_like(row), row, b + 1)[:b]
    end = jnp.cumsum(-(-count // chunk))  # blocks of rows up to and including this one
    blocks = min(n, n // chunk + b)
    step = positions - first[row]
    block = jnp.concatenate([jnp.zeros(1, end.dtype), end])[row] + step // chunk
    step = step % chunk
    row_of_block = jnp.searchsorted(end, jnp.arange(blocks), side="right").clip(max=b - 1)

    token_of_query = inverse(jnp.where(valid, block * chunk + step, blocks * chunk), blocks * chunk)
    query_positions = jnp.take(positions, token_of_query, mode="fill", fill_value=0)
    query = _per_head(valid, block, step, blocks, chunk, kv_heads)
    return Layout(
        token_of_slot=token_of_slot,
        slots_of_token=slots_of_token,
        token_of_query=inverse(query, blocks * kv_heads * chunk),
        query_of_token=query[:, None],
        row_of_block=row_of_block,
        query_positions=query_positions.reshape(blocks, chunk),
        slots_used=used,
        window=s,
    )


def _slots(stream: Stream, kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """`token_of_slot` and `slots_of_token` of a stream."""
    b, s = stream.num_rows, stream.num_slots
    own = _per_head(stream.valid, stream.rows, stream.positions, b, s, kv_heads)
    token_of_slot = inverse(own, b * kv_heads * s)
    if stream.prefix is None:
        return token_of_slot, own[:, None]
    first = _first_positions(stream)
    shared = jnp.arange(s) < first[:b, None]  # [B, S]
    table = token_of_slot.reshape(b, kv_heads, s)
    table = jnp.where(shared[:, None], table[stream.prefix], table)
    # Which rows read from a row: its sharers, numbered in the order of rows.
    rows = jnp.arange(b)
    named = jnp.where(stream.prefix == rows, b, stream.prefix)
    order = jnp.argsort(named)
    rank = jnp.argsort(order) - jnp.searchsorted(named[order], named)
    sharers = jnp.full((b + 1, stream.max_sharers), b, rows.dtype)
    sharers = sharers.at[named, rank].set(rows, mode="drop").at[b].set(b)
    slots = [own]
    for j in range(stream.max_sharers):
        reader = sharers[jnp.where(stream.valid, stream.rows, b), j]
        reads = (reader < b) & (stream.positions < first[reader])
        slots.append(_per_head(reads, reader, stream.positions, b, s, kv_heads))
    return table.reshape(-1), jnp.stack(slots, axis=1)


def _first_positions(stream: Stream) -> jax.Array:
    """[B + 1] the position of each row's first token in the stream; the last is of padding."""
    row = jnp.where(stream.valid, stream.rows, stream.num_rows)
    return jax.ops.segment_min(stream.positions, row, stream.num_rows + 1)


def _per_head(
    valid: jax.Array, row: jax.Array, step: jax.Array, rows: int, steps: int, heads: int
) -> jax.Array:
    """[N*heads] flat places in `[rows, heads, steps]`, out of range where not valid."""
    place = (row[:, None] * heads + jnp.arange(heads)) * steps + step[:, None]
    return jnp.where(valid[:, None], place, rows * heads * steps).reshape(-1)


@jax.custom_vjp
def regroup(x: jax.Array, take: jax.Array, back: jax.Array) -> jax.Array:
    """`x[N, ...][take]`, zero where `take` is out of range.

    `back[N, k]` holds the places in the result at which each row of `x` appears, out of range for
    none. With it the gradient is a gather as well: a scatter-add would run row by row on a CPU.
    """
    # The barriers keep what made x out of the gather, which would make it once for each place.
    return jnp.take(lax.optimization_barrier(x), take, axis=0, mode="fill", fill_value=0)


def _regroup_backward(back: jax.Array, g: jax.Array) -> tuple:
    g = lax.optimization_barrier(g)
    parts = jnp.take(g, back, axis=0, mode="fill", fill_value=0)  # [N, k, ...]
    if back.shape[1] == 1:
        return parts[:, 0], None, None
    return parts.astype(jnp.float32).sum(axis=1).astype(g.dtype), None, None


regroup.defvjp(lambda x, take, back: (regroup(x, take, back), back), _regroup_backward)


def inverse(places: jax.Array, size: int) -> jax.Array:
    """For [N] distinct places in [0, size), the index that holds each; N where none does."""
    n = places.shape[0]
    return jnp.full(size, n, jnp.int32).at[places].set(jnp.arange(n, dtype=jnp.int32), mode="drop")
