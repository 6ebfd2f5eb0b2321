"""Products below f32's normal range, in integers: hardware may flush them, and their factors, to 0.

XLA:CPU runs with subnormals off. Bits of deployed weights must not depend on that, so that the rare
tensor with scales that small is multiplied here.
"""

import jax
import jax.numpy as jnp
from jax import lax

_MANTISSA = 23  # bits of f32 after the leading one
_LOWEST = -149  # exponent of f32's smallest subnormal


def product(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """`codes * scales` in f32, rounded once to nearest even, whatever the hardware does.

    Args:
      codes: f32 of at most 8 significant bits, 0 or at least 2^-16 in magnitude.
      scales: f32 that broadcasts against it.
    """
    scales, codes = jnp.broadcast_arrays(scales, codes)
    code_bits, scale_bits = (lax.bitcast_convert_type(x, jnp.uint32) for x in (codes, scales))
    sign = (code_bits ^ scale_bits) & jnp.uint32(0x80000000)
    field = (scale_bits >> _MANTISSA & 255).astype(jnp.int32)
    # |scale| = mantissa * 2^exponent, with a whole mantissa of up to 24 bits.
    mantissa = scale_bits & 0x7FFFFF | jnp.where(field > 0, 1 << _MANTISSA, 0).astype(jnp.uint32)
    exponent = jnp.maximum(field, 1) - 150
    # The product with the mantissa in the scale's place is normal: only its exponent is off.
    wide = jnp.abs(codes) * mantissa.astype(jnp.float32)
    wide_bits = lax.bitcast_convert_type(wide, jnp.uint32).astype(jnp.int32)
    normal = wide_bits + (exponent << _MANTISSA)
    is_normal = (wide_bits >> _MANTISSA) + exponent > 0
    small = jnp.where(
        is_normal, normal.astype(jnp.uint32), _subnormal(code_bits, mantissa, exponent)
    )
    small = jnp.where((codes == 0) | (mantissa == 0), 0, small)
    bits = jnp.where(
        field < 128,  # above, no product is small, and one may overflow
        small | sign,
        lax.bitcast_convert_type(codes * scales, jnp.uint32),
    )
    return lax.bitcast_convert_type(bits, jnp.float32)


def _subnormal(code_bits: jax.Array, mantissa: jax.Array, exponent: jax.Array) -> jax.Array:
    """Bits of a product below 2^-126: a whole number of the smallest subnormals."""
    code = code_bits >> 16 & 0x7F | 0x80
    whole = mantissa * code  # below 2^32
    # At most 23 to the right: no code is below 2^-16, no exponent below that of the grid.
    shift = _LOWEST - exponent - ((code_bits >> _MANTISSA & 255).astype(jnp.int32) - 134)
    right = jnp.maximum(shift, 0).astype(jnp.uint32)
    left = jnp.maximum(-shift, 0).astype(jnp.uint32)
    kept = whole >> right
    rest, half = whole - (kept << right), jnp.uint32(1) << (jnp.maximum(right, 1) - 1)
    up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    return jnp.where(right > 0, kept + up, whole << left)
