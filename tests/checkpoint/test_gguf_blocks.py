"""GGUF's blocks: the same bits as the gguf package's decode, for random blocks of every type."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.checkpoint.gguf_blocks import OTHER_TYPES, TYPES
from orbit_jax.quant.qtensor import QTensor, dequantize

BLOCKS = np.load(Path(__file__).parents[1] / "goldens/gguf/blocks.npz")
every_type = pytest.mark.parametrize("block", TYPES.values(), ids=lambda block: block.name)
quantised = pytest.mark.parametrize(
    "block", [b for b in TYPES.values() if not b.is_float], ids=lambda block: block.name
)


def decoded(block) -> tuple[QTensor, np.ndarray]:
    """Two rows of blocks as a QTensor, and the values that the gguf package gives them."""
    return block.unpack(BLOCKS[block.name]), BLOCKS[f"{block.name}_decoded"]


def bits(x: jax.Array) -> np.ndarray:
    """f32 as bits, so that -0 differs from 0."""
    return np.asarray(x).view(np.uint32)


@every_type
def test_values_are_the_bits_of_the_reference_decode(block):
    q, expected = decoded(block)
    assert q.shape == expected.shape
    np.testing.assert_array_equal(bits(dequantize(q, jnp.float32)), expected)
    in_jit = jax.jit(dequantize, static_argnums=1)(q, jnp.float32)
    np.testing.assert_array_equal(bits(in_jit), expected)


@quantised
def test_products_are_exact_so_that_a_fused_multiply_add_changes_nothing(block):
    q, _ = decoded(block)
    products = dequantize(q.replace(minimum=None), jnp.float32)
    codes = np.asarray(dequantize(unscaled(q), jnp.float32), np.float64)
    exact = codes * np.repeat(in_double(q.scales), q.group_size, axis=-1)
    np.testing.assert_array_equal(np.asarray(products, np.float64), exact)


@every_type
def test_values_are_rounded_to_bf16_once(block):
    q, expected = decoded(block)
    got = jax.jit(dequantize, static_argnums=1)(q, jnp.bfloat16)
    rounded = expected.view(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), rounded.view(np.uint16))


@every_type
def test_no_byte_is_added(block):
    q, _ = decoded(block)
    assert q.nbytes == BLOCKS[block.name].nbytes


@quantised
def test_every_code_and_sign_is_in_the_reference(block):
    q, expected = decoded(block)
    codes = dequantize(unscaled(q), jnp.float32)
    assert len(np.unique(codes)) >= {4: 16, 6: 64, 8: 200}[int(q.format[-1])]
    assert np.unique(np.signbit(expected.view(np.float32))).tolist() == [False, True]


def unscaled(q: QTensor) -> QTensor:
    """The same codes with scales of 1."""
    *lead, width = q.shape
    ones = np.full((*lead, width // q.group_size), 0x3F80, np.uint16)
    return QTensor(q.codes, ones, None, q.format, group_size=q.group_size)


def in_double(scales: QTensor | np.ndarray) -> np.ndarray:
    """fp16 scales, quantised themselves or not, in float64."""
    if not isinstance(scales, QTensor):
        return np.asarray(scales).view(np.float16).astype(np.float64)
    codes = np.asarray(dequantize(unscaled(scales), jnp.float32), np.float64)
    return codes * np.repeat(in_double(scales.scales), scales.group_size, axis=-1)


def test_types_that_are_named_in_refusals_are_not_read():
    assert not TYPES.keys() & OTHER_TYPES.keys()
