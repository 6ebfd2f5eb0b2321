"""Codes of every kind: how many bits each has, how they lie in bytes, and the numbers they are."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Format:
    """How codes are read: bits of each, and the code that stands for zero (or for the minimum)."""

    bits: int
    zero: int | None  # None: the codes are the bits of a floating point number
    float_dtype: str | None = None

    @property
    def plain(self) -> bool:
        """Whether codes are the values themselves, without scales."""
        return self.bits >= 16

    @property
    def smallest(self) -> float:
        """The smallest magnitude above zero of the number that a code is."""
        if self.zero is not None:
            return 1.0
        return float(jnp.finfo(self.float_dtype).smallest_subnormal)


# Every format, one line each. A tensor with an `offset` reads its zero codes from there instead of
# `zero` (asymmetric checkpoints).
FORMATS: dict[str, Format] = {
    "int4": Format(bits=4, zero=8),
    "int6": Format(bits=6, zero=32),
    "int8": Format(bits=8, zero=128),
    "uint4": Format(bits=4, zero=0),
    "uint6": Format(bits=6, zero=0),
    "e2m1": Format(bits=4, zero=None, float_dtype="float4_e2m1fn"),
    "e4m3": Format(bits=8, zero=None, float_dtype="float8_e4m3fn"),
    "e5m2": Format(bits=8, zero=None, float_dtype="float8_e5m2"),
    "bfloat16": Format(bits=16, zero=None, float_dtype="bfloat16"),
    "float16": Format(bits=16, zero=None, float_dtype="float16"),
    "float32": Format(bits=32, zero=None, float_dtype="float32"),
}


def e4m3_numbers() -> np.ndarray:
    """`[256]` f32: the number that each byte is as an e4m3 float."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def floats_of(codes: jax.Array, form: str) -> jax.Array:
    """Codes of 4 or 8 bits, one a byte, as the f32 values of the floats that they are."""
    if form != "e2m1":
        floats = lax.bitcast_convert_type(codes, jnp.dtype(FORMATS[form].float_dtype))
        return floats.astype(jnp.float32)
    codes = codes.astype(jnp.uint32)
    size = codes & 7
    # From 1 up, the two bits of the exponent and the one of the mantissa lie as in f32.
    bits = jnp.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)
    return lax.bitcast_convert_type(bits | (codes & 8) << 28, jnp.float32)


def unpack(packed: jax.Array, bits: int, width: int) -> jax.Array:
    """The codes of 4, 6 or 8 bits, one a byte: `[..., width]` uint8."""
    if bits == 8:
        return packed
    codes = unpack_nibbles(packed[..., : width // 2], axis=-1)
    if bits == 6:
        high = packed[..., width // 2 :, None] >> jnp.arange(0, 8, 2, dtype=jnp.uint8) & 3
        codes |= high.reshape(codes.shape) << 4
    return codes


def unpack_nibbles(packed: jax.Array, axis: int) -> jax.Array:
    """Two 4-bit codes a byte, low nibble first, to one code a byte along `axis` (-1 or -2)."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=axis)
    shape = list(packed.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)
