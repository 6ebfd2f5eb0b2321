"""Low-bit tensors: what is read out of the bits, against a decoder written in plain numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.quant.qtensor import (
    QTensor,
    Unstacked,
    dequantize,
    from_float,
    select,
    take_rows,
    working_copy,
)

BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
LEAD = (2, 3)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pairs along the last axis, low nibble first."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def draw(bits: int, out: int, width: int, group: int, symmetric: bool, scale_dtype: str):
    """A random tensor of LEAD matrices, with the f32 values that it stands for."""
    rng = np.random.default_rng(out * width + bits)
    codes = rng.integers(0, 2**bits, (*LEAD, out, width))
    groups = width // group
    scales = rng.uniform(1e-3, 2e-1, (*LEAD, out, groups)).astype(ml_dtypes.bfloat16)
    scales = scales.astype(np.dtype(getattr(ml_dtypes, scale_dtype, scale_dtype)))
    zeros = rng.integers(0, 2**bits, (*LEAD, out, groups))
    values = np.zeros(codes.shape, np.float32)
    for at in np.ndindex(*codes.shape):
        *lead, row, column = at
        place = (*lead, row, column // group)
        zero = 2 ** (bits - 1) if symmetric else zeros[place]
        values[at] = np.float32(codes[at] - zero) * np.float32(scales[place])
    offset = None if symmetric else zeros.astype(np.uint8)
    packed = codes.astype(np.uint8)
    if bits == 4:
        packed = pack_nibbles(codes)
        if offset is not None:
            # compressed-tensors packs zero codes along the output, which may be odd.
            padded = np.pad(zeros, ((0, 0), (0, 0), (0, out % 2), (0, 0)))
            offset = np.moveaxis(pack_nibbles(np.moveaxis(padded, -2, -1)), -1, -2)
    q = QTensor(
        codes=jnp.asarray(packed),
        scales=jnp.asarray(scales.view(BITS[scale_dtype])),
        offset=None if offset is None else jnp.asarray(offset),
        format=f"int{bits}",
        scale_dtype=scale_dtype,
        group_size=group,
    )
    return q, values


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "out", "width", "group", "scale_dtype"),
    [
        (4, 5, 24, 8, "bfloat16"),
        (4, 6, 24, 24, "float16"),
        (4, 3, 12, 2, "float32"),
        (4, 1, 6, 3, "bfloat16"),
        (8, 5, 21, 7, "bfloat16"),
        (8, 4, 8, 1, "float32"),
    ],
)
def test_dequantize_equals_a_plain_decoder_bit_for_bit(
    bits, out, width, group, scale_dtype, symmetric
):
    q, values = draw(bits, out, width, group, symmetric, scale_dtype)
    assert q.shape == values.shape
    widen = jax.jit(dequantize, static_argnums=1)
    np.testing.assert_array_equal(widen(q, jnp.float32), values)
    np.testing.assert_array_equal(widen(q, jnp.bfloat16), values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_travel_as_their_bits(dtype):
    bits = BITS[dtype]
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, np.iinfo(bits).max, (4, 64), dtype=bits, endpoint=True)
    held = patterns.view(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    q = from_float(held)
    assert isinstance(q.codes, np.ndarray), "a host array must stay on the host"
    back = dequantize(jax.tree.map(jnp.asarray, q), jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(back).view(bits), patterns)
    on_device = from_float(jnp.asarray(held))
    np.testing.assert_array_equal(on_device.codes, patterns)
    assert on_device.nbytes == q.nbytes == held.nbytes


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64])
def test_a_type_that_is_no_weight_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype \w+ is not one of bfloat16, float16, float32"):
        from_float(np.zeros((2, 2), dtype))


@pytest.mark.parametrize("symmetric", [True, False])
def test_select_is_the_tensor_at_an_index(symmetric):
    q, values = draw(4, 5, 16, 8, symmetric, "bfloat16")
    read = jax.jit(lambda q, index: dequantize(select(q, index), jnp.float32))
    np.testing.assert_array_equal(read(q, (np.int32(1), np.int32(2))), values[1, 2])
    np.testing.assert_array_equal(read(q, (np.int32(0),)), values[0])


def test_select_reads_one_slice_of_each_field():
    q, _ = draw(4, 5, 16, 8, False, "bfloat16")
    jaxpr = jax.make_jaxpr(select)(q, (jnp.int32(1), jnp.int32(2)))
    reads = [e for e in jaxpr.eqns if any(v.aval.shape[:2] == LEAD for v in e.invars)]
    assert [e.primitive.name for e in reads] == ["dynamic_slice"] * 3
    # The whole stack is neither widened nor copied: what is made is smaller than one slice of it
    # in f32 plus its bits.
    stack = jax.tree.map(lambda leaf: jnp.tile(leaf, (8, 8, *(1,) * (leaf.ndim - 2))), q)
    program = jax.jit(lambda q, i: dequantize(select(q, (i, i)), jnp.float32))
    memory = program.lower(stack, jnp.int32(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 5 * 16 * 4 + stack.nbytes // (16 * 24) + 256


def test_rows_of_a_quantised_embedding_are_read_packed():
    q, values = draw(4, 5, 16, 8, True, "bfloat16")
    table = jax.tree.map(lambda leaf: leaf[0, 0], q)
    read = jax.jit(lambda q, rows: dequantize(take_rows(q, rows), jnp.float32))
    np.testing.assert_array_equal(read(table, np.array([4, 0, 4])), values[0, 0][[4, 0, 4]])
    with pytest.raises(ValueError, match="packed zero codes"):
        take_rows(draw(4, 5, 16, 8, False, "bfloat16")[0], np.array([0]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_working_copy_has_the_same_values(symmetric):
    q, values = draw(4, 5, 24, 8, symmetric, "bfloat16")
    copy = jax.jit(working_copy)(q)
    assert copy.shape == q.shape
    assert {leaf.dtype for leaf in jax.tree.leaves(copy)} == {jnp.dtype("bfloat16")}
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(copy)) == values.size * 2
    np.testing.assert_array_equal(widened(copy), values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_working_copy_of_floats_keeps_their_type(dtype):
    values = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 8)), dtype)
    copy = working_copy(from_float(values))
    assert {leaf.dtype for leaf in jax.tree.leaves(copy)} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(widened(copy, dtype), values)


def widened(copy: Unstacked, dtype=jnp.bfloat16) -> jax.Array:
    """A stack of a working copy's layers."""
    return jnp.stack([dequantize(layer, dtype) for layer in copy.layers])


def draw_uneven(bits: int, nested: bool):
    """A `uint` tensor `[2, 3, 4, 32]` with minima, its scales as floats or quantised themselves."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (*LEAD, 4, 32))
    packed = pack_nibbles(codes & 15)
    if bits == 6:
        high = sum((codes[..., i::4] >> 4) << 2 * i for i in range(4))
        packed = np.concatenate([packed, high.astype(np.uint8)], axis=-1)
    held, values = [], []
    for _ in range(2):
        floats = rng.uniform(-1, 1, (*LEAD, 4, 4)).astype(np.float16)
        if nested:
            inner = rng.integers(0, 256, floats.shape)
            outer = floats[..., :2].view(np.uint16)
            pair = QTensor(inner.astype(np.uint8), outer, None, "int8", None, "float16", 2)
            wide = np.repeat(floats[..., :2].astype(np.float32), 2, axis=-1)
            held.append(jax.tree.map(jnp.asarray, pair))
            values.append((inner - 128).astype(np.float32) * wide)
        else:
            held.append(jnp.asarray(floats.view(np.uint16)))
            values.append(floats.astype(np.float32))
    scale, minimum = (np.repeat(v, 8, axis=-1) for v in values)
    q = QTensor(jnp.asarray(packed), held[0], None, f"uint{bits}", held[1], "float16", 8)
    return q, codes.astype(np.float32) * scale + minimum


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bits", [4, 6])
def test_minima_and_quantised_scales_equal_a_plain_decoder_bit_for_bit(bits, nested):
    q, values = draw_uneven(bits, nested)
    assert q.shape == values.shape
    widen = jax.jit(dequantize, static_argnums=1)
    np.testing.assert_array_equal(dequantize(q, jnp.float32), values)
    np.testing.assert_array_equal(widen(q, jnp.float32), values)
    np.testing.assert_array_equal(widen(q, jnp.bfloat16), values.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(widened(working_copy(q)), widen(q, jnp.bfloat16))
    read = jax.jit(lambda q, index: dequantize(select(q, index), jnp.float32))
    np.testing.assert_array_equal(read(q, (np.int32(1), np.int32(2))), values[1, 2])
    rows = jax.jit(lambda q, rows: dequantize(take_rows(q, rows), jnp.float32))
    table = select(q, (1, 0))
    np.testing.assert_array_equal(rows(table, np.array([3, 0])), values[1, 0][[3, 0]])


def test_nbytes_counts_what_is_held():
    q, _ = draw(4, 6, 32, 8, False, "bfloat16")
    matrices = np.prod(LEAD)
    assert q.nbytes == matrices * (6 * 32 // 2 + 6 * 4 * 2 + 3 * 4)
