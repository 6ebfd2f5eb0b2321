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
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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


@every_type
def test_a_fused_multiply_add_would_give_the_same_bits(block):
    """Compilers may fuse; a neighbouring product must not change what is read."""
    q, expected = decoded(block)
    scaled = jax.jit(lambda q, s: (dequantize(q, jnp.float32), dequantize(q, jnp.float32) * s))
    np.testing.assert_array_equal(bits(scaled(q, jnp.float32(3))[0]), expected)


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


@every_type
def test_every_code_and_sign_is_in_the_reference(block):
    q, expected = decoded(block)
    assert np.signbit(expected.view(np.float32)).any()
    assert not np.signbit(expected.view(np.float32)).all()
    if block.name not in PLAIN:
        codes = dequantize(unscaled(q), jnp.float32)
        assert len(np.unique(codes)) >= {4: 16, 6: 64, 8: 200}[int(q.format[-1])]
    else:
        assert q.format == PLAIN[block.name]


def unscaled(q: QTensor) -> QTensor:
    """The same codes with scales of 1."""
    *lead, width = q.shape
    ones = np.full((*lead, width // q.group_size), 0x3F80, np.uint16)
    return QTensor(q.codes, ones, None, q.format, group_size=q.group_size)


def test_types_that_are_named_in_refusals_are_not_read():
    assert not TYPES.keys() & OTHER_TYPES.keys()
