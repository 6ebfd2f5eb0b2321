"""Attention: against plain numpy, and the same bits for a query alone as among many."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.model.attention import Cache, Scoring, attend, attend_cached, by_slot
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.rope import angles, rotate
from orbit_jax.model.stream import Stream, lay_out, regroup

B, S = 3, 64
LENGTHS = (64, 37, 5)


def model(head_dim: int, queries_per_kv: int, **changes) -> ModelConfig:
    return dataclasses.replace(
        toy.MOE, num_kv_heads=2, num_heads=2 * queries_per_kv, head_dim=head_dim, **changes
    )


def whole_rows() -> Stream:
    """Rows of LENGTHS, with padding between them."""
    rows = [b for b in range(B) for _ in range(LENGTHS[b])] + [B] * 6
    positions = [t for b in range(B) for t in range(LENGTHS[b])] + [0] * 6
    order = np.argsort(np.r_[np.arange(64), 70 + np.arange(42), 64 + np.arange(6)], kind="stable")
    rows, positions = (np.asarray(x, np.int32)[order] for x in (rows, positions))
    return Stream(np.zeros_like(rows), rows, positions, B, S)


@functools.cache
def tensors(config: ModelConfig, dtype: str) -> tuple[np.ndarray, ...]:
    """Queries `[N, H, hd]`, keys and values `[N, K, hd]` of `whole_rows`."""
    rng = np.random.default_rng(0)
    n = len(whole_rows().rows)
    shapes = [(n, h, config.head_dim) for h in (config.num_heads, 2, 2)]
    return tuple(rng.standard_normal(s, np.float32).astype(jnp.dtype(dtype)) for s in shapes)


def scoring(config: ModelConfig) -> Scoring:
    return Scoring(config.score_scale)


def attention(config: ModelConfig, queries: Stream, q, everything: Stream, k, v) -> jax.Array:
    """`queries` attend to the keys and values of `everything`."""
    layout = lay_out(config, everything, everything)
    keys, values = by_slot(layout, everything, k), by_slot(layout, everything, v)
    return attend(config, lay_out(config, queries, queries), scoring(config), q, keys, values)


def decoding(config: ModelConfig, queries: Stream, q, everything: Stream, k, v) -> jax.Array:
    """The same for one query a row, with a cache; rows are repeated until there is one for each."""
    layout = lay_out(config, everything, everything)
    copies = queries.num_rows // everything.num_rows

    def held(x: jax.Array) -> jax.Array:
        slots = by_slot(layout, everything, x).swapaxes(1, 2)
        return jnp.tile(slots, (copies, 1, 1, 1))[None]

    cache = Cache(held(k), held(v))
    layout = lay_out(config, queries, queries)
    return attend_cached(config, layout, scoring(config), q, cache, jnp.int32(0))


def jit(fn):
    return toy.programs.jit(fn, toy.programs.options("fast"), static_argnames=("config",))


program, decode_program = jit(attention), jit(decoding)


def reference(config: ModelConfig, stream: Stream, q, k, v) -> np.ndarray:
    """A loop over tokens and heads, in f64."""
    out = np.zeros((len(q), config.num_heads, config.head_dim))
    for n in np.flatnonzero(stream.rows < B):
        seen = (stream.rows == stream.rows[n]) & (stream.positions <= stream.positions[n])
        for h in range(config.num_heads):
            kv = h // config.queries_per_kv
            scores = k[seen, kv].astype(np.float64) @ q[n, h].astype(np.float64)
            weights = np.exp(scores / np.sqrt(config.head_dim))
            out[n, h] = (weights / weights.sum()) @ v[seen, kv].astype(np.float64)
    return out.reshape(len(q), -1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"query_chunk": 16}, {"query_chunk": 24}, {"recipe": "tiles", "tile_rows": 16}],
    ids=["whole rows", "blocks", "blocks of an odd size", "tiles"],
)
def test_agrees_with_a_loop_over_tokens(changes):
    config = model(16, 2, compute_dtype="float32", **changes)
    stream = whole_rows()
    q, k, v = tensors(config, "float32")
    out = jax.jit(attention, static_argnums=0)(config, stream, q, stream, k, v)
    valid = np.asarray(stream.valid)
    expected = reference(config, stream, q, k, v)
    np.testing.assert_allclose(out[valid], expected[valid], rtol=1e-5, atol=1e-5)


def test_gradients_through_blocks_equal_those_through_whole_rows():
    stream = whole_rows()
    grads = []
    for chunk in (16, 128):
        config = model(16, 2, compute_dtype="float32", query_chunk=chunk)
        q, k, v = tensors(config, "float32")

        def loss(q, k, v, config=config):
            return jnp.sin(attention(config, stream, q, stream, k, v)).sum()

        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copies", [1, 14])  # 14: more rows than decoding takes in one part
@pytest.mark.parametrize(("head_dim", "queries_per_kv"), [(16, 1), (64, 2), (80, 3), (128, 4)])
def test_a_query_alone_has_the_bits_that_it_has_among_many(head_dim, queries_per_kv, copies):
    config = model(head_dim, queries_per_kv)
    stream = whole_rows()
    q, k, v = tensors(config, "bfloat16")
    together = np.asarray(program(config, stream, q, stream, k, v))
    for positions in ([63, 20, 4], [0, 36, 2]):
        positions = np.asarray(positions, np.int32)
        at = [
            np.flatnonzero((stream.rows == b) & (stream.positions == t))[0]
            for b, t in enumerate(positions)
        ]
        at = np.tile(at, copies)
        rows = np.arange(len(at), dtype=np.int32)
        decode = Stream(rows, rows, np.tile(positions, copies), len(at), S, decode=True)
        alone = decode_program(config, decode, q[at], stream, k, v)
        np.testing.assert_array_equal(alone, together[at])


def test_more_slots_behind_a_row_change_nothing():
    config = model(64, 2)
    stream = whole_rows()
    q, k, v = tensors(config, "bfloat16")
    few = program(config, stream, q, stream, k, v)
    longer = stream.replace(num_slots=192)
    np.testing.assert_array_equal(program(config, longer, q, longer, k, v), few)


def test_rotary_angles_are_those_of_the_positions():
    config = model(32, 1)
    stream = whole_rows()
    cos, sin = (table[stream.positions] for table in angles(config.rope, 32, S))
    inverse = config.rope.theta ** (-np.arange(16) / 16)
    turns = stream.positions[:, None] * inverse
    np.testing.assert_allclose(cos, np.cos(turns), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(turns), atol=1e-6)
    # A rotation keeps lengths, and products depend on the distance alone.
    x = np.ones((len(stream.rows), 1, 32), np.float32)
    turned = np.asarray(rotate(config.rope, jnp.asarray(x), cos, sin))[:, 0]
    np.testing.assert_allclose((turned**2).sum(axis=1), 32, rtol=1e-5)
    row = turned[stream.rows == 0]
    np.testing.assert_allclose(row[3] @ row[10], row[40] @ row[47], rtol=1e-4)


def test_regroup_and_its_gradient():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    take = np.array([2, 0, 9, 2, 3])
    back = np.array([[1, 9], [9, 9], [0, 3], [4, 9]])
    out, backward = jax.vjp(lambda x: regroup(x, take, back), x)
    np.testing.assert_array_equal(out, [x[2], x[0], 0 * x[0], x[2], x[3]])
    g = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(backward(g)[0], [g[1], 0 * g[0], g[0] + g[3], g[4]])


def test_the_gradient_to_keys_does_not_lose_bits_to_the_number_of_blocks():
    """Thirty-two blocks add to it: in bf16 the sum would be twice as far from the f32 one."""
    length = 512
    at = np.arange(length, dtype=np.int32)
    stream = Stream(at, np.zeros_like(at), at, 1, length)
    rng = np.random.default_rng(0)
    shapes = [(length, heads, 32) for heads in (4, 2, 2)]
    qkv = [rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in shapes]

    def gradient(dtype: str) -> np.ndarray:
        config = model(32, 2, query_chunk=16, compute_dtype=dtype)

        def loss(k, q, v):
            return jnp.sin(attention(config, stream, q, stream, k, v).astype(jnp.float32)).sum()

        q, k, v = (x.astype(jnp.dtype(dtype)) for x in qkv)
        return np.asarray(jax.jit(jax.grad(loss))(k, q, v), np.float32)

    exact = gradient("float32")
    error = np.linalg.norm(gradient("bfloat16") - exact) / np.linalg.norm(exact)
    assert error < 5e-3


def test_blocks_of_a_row_taken_a_few_at_a_time_change_nothing(monkeypatch):
    """What happens when not all scores fit at once."""
    whole, config = model(64, 2), model(64, 2, query_chunk=16)
    stream = whole_rows()
    q, k, v = tensors(config, "bfloat16")
    together = program(whole, stream, q, stream, k, v)
    of_one_block = 4 * config.num_heads * 16 * S
    for blocks in (2, 99):
        monkeypatch.setattr("orbit_jax.model.attention._MAX_SCORE_BYTES", blocks * of_one_block)
        again = toy.programs.jit(
            attention, toy.programs.options("fast"), static_argnames=("config",)
        )
        np.testing.assert_array_equal(again(config, stream, q, stream, k, v), together)
