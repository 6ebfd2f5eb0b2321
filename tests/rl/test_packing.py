import numpy as np
import pytest

from orbit_jax.rl.packing import largest_part, pack, sizes, smallest_fit


def test_sizes_are_whole_tiles_in_every_shard():
    assert sizes(1024, (3 / 8, 5 / 8, 1.0), 1) == (384, 640, 1024)
    assert sizes(100, (3 / 8, 1.0), 1) == (48, 112)
    assert sizes(1024, (1 / 32, 1.0), 4) == (64, 1024)
    for shards in (1, 2, 4, 8):
        assert all(size % (16 * shards) == 0 for size in sizes(1000, (0.1, 0.3, 1.0), shards))


def test_the_smallest_size_whose_shards_hold_the_tokens_is_taken():
    assert smallest_fit(1, (384, 640, 1024), 1) == 384
    assert smallest_fit(384, (384, 640, 1024), 1) == 384
    assert smallest_fit(385, (1024, 384, 640), 1) == 640
    assert smallest_fit(193, (384, 640, 1024), 2) == 640
    with pytest.raises(ValueError, match="1025 tokens a shard do not fit"):
        smallest_fit(1025, (384, 640, 1024), 1)


@pytest.mark.parametrize("seed", range(20))
def test_packing_equals_a_loop(seed):
    rng = np.random.default_rng(seed)
    shards = int(rng.choice([1, 2, 4]))
    num_rows = shards * int(rng.integers(1, 5))
    rows = [r for r in rng.permutation(num_rows) if rng.random() < 0.8]
    pieces = [
        (int(r), int(rng.integers(0, 9)), rng.integers(1, 99, rng.integers(0, 8)).tolist())
        for r in rows
    ]
    counts = np.zeros(num_rows, int)
    for row, _, ids in pieces:
        counts[row] = len(ids)
    by_shard = [0] * shards
    for row in range(num_rows):
        by_shard[row * shards // num_rows] += counts[row]
    fullest = largest_part(counts, num_rows, shards)
    assert fullest == max(by_shard)

    part = fullest + int(rng.integers(0, 5))
    expected = []
    for shard in range(shards):
        here = [
            (token, row, first + i)
            for row, first, ids in pieces
            if row * shards // num_rows == shard
            for i, token in enumerate(ids)
        ]
        expected += here + [(0, num_rows, 0)] * (part - len(here))
    packed = pack(pieces, num_rows, shards, part * shards)
    found = list(zip(packed.tokens, packed.rows, packed.positions, strict=True))
    assert found == expected
    assert {packed.tokens.dtype, packed.rows.dtype, packed.positions.dtype} == {np.dtype("int32")}


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shard 1 holds more than 2 tokens"):
        pack([(0, 0, [1]), (1, 0, [1, 2, 3])], 2, 2, 4)
