"""Making weights of floats of 4 or 8 bits from wider ones; `quantize.py` makes whole numbers.

A group's scale follows from its largest magnitude, is rounded to the type in which it is stored,
and only then are codes made: each is the nearest to its weight that the stored scale allows, ties
to the even code, and a weight beyond the largest code becomes that one. A group of zeros has the
scale 1, or the smallest there is, so that its products are zeros and not subnormal numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orbit_jax.quant.codes import e4m3_numbers
from orbit_jax.quant.qtensor import QTensor, round_to

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E4M3_SMALLEST = 2.0**-9
# Below this a product with the smallest code would be subnormal.
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny) / _E4M3_SMALLEST


def quantize_e4m3(w: jax.Array) -> QTensor:
    """`w[..., out, in]` in e4m3 with one bf16 scale a row: its largest magnitude over 448."""
    w = w.astype(jnp.float32)
    largest = _largest(w)
    scales = jnp.where(largest > 0, jnp.maximum(_over(largest, _E4M3_MAX), _SMALLEST_SCALE), 1.0)
    scales = round_to(scales, jnp.bfloat16)
    codes = jnp.clip(_over(w, scales.astype(jnp.float32)), -_E4M3_MAX, _E4M3_MAX)
    return QTensor(
        codes=lax.bitcast_convert_type(codes.astype(jnp.float8_e4m3fn), jnp.uint8),
        scales=lax.bitcast_convert_type(scales, jnp.uint16),
        offset=None,
        format="e4m3",
        group_size=w.shape[-1],
    )


def quantize_mxfp4(w: jax.Array) -> QTensor:
    """`w[..., out, in]` in e2m1 with a power of two for each 32 columns.

    The power is that of the group's largest magnitude, less the 2 of e2m1's largest, as the OCP
    MX specification has it, but for a magnitude that is first rounded to e2m1's one bit behind the
    point (compressed-tensors does the same). One between 7 and 8 times the power, which would be
    cut to 6, so becomes 8.
    """
    grouped = _grouped(w, 32)
    bits = lax.bitcast_convert_type(_largest(grouped)[..., 0], jnp.uint32)
    exponents = (bits + (1 << 21)) >> 23  # a quarter of the power is added: from 1.75 on, the next
    exponents = jnp.where(bits == 0, 127, jnp.clip(exponents, 2, 254) - 2)
    inverse = lax.bitcast_convert_type((254 - exponents) << 23, jnp.float32)
    return QTensor(
        codes=_pairs(_e2m1(grouped * inverse[..., None])).reshape(*w.shape[:-1], -1),
        scales=exponents.astype(jnp.uint8),
        offset=None,
        format="e2m1",
        scale_dtype="float8_e8m0fnu",
        group_size=32,
    )


def quantize_nvfp4(w: jax.Array, overall: jax.Array, levels: jax.Array) -> QTensor:
    """`w[out, in]` in e2m1 with an e4m3 scale for each 16 columns.

    Args:
      w: the weight.
      overall: by which scales are divided, of `nvfp4_overall`.
      levels: `[1, 256]` f32, what each byte of the scales then stands for, of `nvfp4_levels`.
    """
    grouped = _grouped(w, 16)
    scales = _over(_largest(grouped)[..., 0], _E2M1_MAX) * overall
    scales = jnp.clip(scales, _E4M3_SMALLEST, _E4M3_MAX).astype(jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    each = jnp.take(levels[0], scales.astype(jnp.int32))[..., None]
    return QTensor(
        codes=_pairs(_e2m1(_over(grouped, each))).reshape(*w.shape[:-1], -1),
        scales=scales,
        offset=None,
        format="e2m1",
        scale_dtype="float8_e4m3fn",
        group_size=16,
        levels=levels,
    )


def nvfp4_overall(largest: float) -> np.float32:
    """The scale of a whole tensor with this largest magnitude, by which others are divided.

    With it the largest group's scale is e4m3's largest number.
    """
    with np.errstate(all="ignore"):
        overall = np.float32(_E4M3_MAX * _E2M1_MAX) / np.float32(largest)
    return overall if np.isfinite(overall) else np.float32(1)


def nvfp4_levels(overall: np.float32) -> np.ndarray:
    """`[1, 256]` f32: each byte of the scales divided by the scale of the whole tensor.

    On the host, as the reader of a checkpoint does it: a compiled program may multiply instead.
    """
    return (e4m3_numbers() / overall)[None]


def _largest(w: jax.Array) -> jax.Array:
    return jnp.abs(w).max(axis=-1, keepdims=True)


def _over(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """A quotient, rounded once: where many share a divisor XLA would multiply by its inverse."""
    return x / lax.optimization_barrier(jnp.broadcast_to(jnp.float32(divisor), x.shape))


def _grouped(w: jax.Array, group: int) -> jax.Array:
    """f32 `[..., in/G, G]`."""
    width = w.shape[-1]
    if width % group:
        raise ValueError(f"the input width {width} is not a multiple of the format's {group}")
    return w.astype(jnp.float32).reshape(*w.shape[:-1], width // group, group)


def _e2m1(x: jax.Array) -> jax.Array:
    """The code of the number nearest to each, one a byte; its sign bit is that of x."""
    size = jnp.minimum(jnp.abs(x), _E2M1_MAX)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    size = jnp.round(size / step) * step  # halves go to the even multiple, which has the even code
    code = jnp.where(size < 2, size * 2, jnp.where(size < 4, size + 2, size / 2 + 4))
    return code.astype(jnp.uint8) | jnp.signbit(x).astype(jnp.uint8) << 3


def _pairs(codes: jax.Array) -> jax.Array:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4
