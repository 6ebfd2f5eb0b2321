"""Laying rows of tokens out as flat streams, on the host: the one place where padding is chosen."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packed:
    """N tokens in `shards` equal parts; part i holds only rows of shard i, each row contiguous.

    Attributes:
      tokens, rows, positions: [N] int32; padding has row `num_rows`.
    """

    tokens: np.ndarray
    rows: np.ndarray
    positions: np.ndarray


def sizes(largest: int, shares: Sequence[float], shards: int) -> tuple[int, ...]:
    """Stream lengths that are used at all: shares of the largest, each shard a multiple of 16.

    Kernels take rows in tiles of that many, and a short list keeps the number of programs small.
    """
    return tuple(-(-int(largest * share) // (16 * shards)) * 16 * shards for share in shares)


def smallest_fit(fullest_shard: int, sizes: Sequence[int], shards: int) -> int:
    """The smallest of `sizes` whose shards hold `fullest_shard` tokens.

    Raises:
      ValueError: if none does.
    """
    for size in sorted(sizes):
        if size // shards >= fullest_shard:
            return size
    raise ValueError(f"{fullest_shard} tokens a shard do not fit streams of {sizes} tokens")


def pack(
    pieces: Sequence[tuple[int, int, Sequence[int]]], num_rows: int, shards: int, size: int
) -> Packed:
    """Packs `(row, first position, tokens)` pieces into a stream of `size` tokens.

    Rows lie over shards in equal consecutive blocks, as the mesh places them.
    """
    part, rows_per_shard = size // shards, num_rows // shards
    tokens = np.zeros(size, np.int32)
    rows = np.full(size, num_rows, np.int32)
    positions = np.zeros(size, np.int32)
    used = [0] * shards
    for row, first, ids in pieces:
        shard = row // rows_per_shard
        at = slice(shard * part + used[shard], shard * part + used[shard] + len(ids))
        used[shard] += len(ids)
        if used[shard] > part:
            raise ValueError(f"pack: shard {shard} holds more than {part} tokens")
        tokens[at], rows[at] = ids, row
        positions[at] = np.arange(first, first + len(ids))
    return Packed(tokens, rows, positions)


def largest_part(lengths: Sequence[int], num_rows: int, shards: int) -> int:
    """Tokens in the fullest shard, given the token count of each of `num_rows` rows."""
    return int(np.asarray(lengths).reshape(shards, num_rows // shards).sum(axis=1).max())
