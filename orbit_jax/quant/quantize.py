"""Making low-bit weights from bf16 ones. The only file that knows AQT."""

import jax
import jax.numpy as jnp
from aqt.jax.v2 import aqt_quantizer
from jax import lax

from orbit_jax.quant.qtensor import FORMATS, QTensor


def quantize(w: jax.Array, bits: int = 4, group_size: int = 32) -> QTensor:
    """Quantises `w[..., out, in]` symmetrically, with one bf16 scale per group along `in`.

    Scales are AQT's absolute-maximum calibration of each group, rounded to bf16 before the codes
    are made, so that the codes fit the scales that will be stored.

    Raises:
      ValueError: if `bits` is not 4 or 8, if `group_size` does not divide `in`, or if 4-bit codes
        do not pair up along `in`.
    """
    name = f"int{bits}"
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: the quantiser makes 4 or 8 bit codes")
    *lead, out, width = w.shape
    if bits == 4 and width % 2:
        raise ValueError(f"input width {width} is odd: 4-bit codes lie in pairs; use bits=8")
    if group_size <= 0 or width % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the input width {width}: choose a divisor"
        )
    grouped = w.astype(jnp.float32).reshape(*lead, out, width // group_size, group_size)
    quantizer = aqt_quantizer.quantizer_make(bits, scale_dtype=jnp.bfloat16)
    quantized, _ = quantizer.quant(grouped, calibration_axes=[grouped.ndim - 1])
    codes = (quantized.qvalue.astype(jnp.int32) + FORMATS[name].zero).astype(jnp.uint8)
    codes = codes.reshape(*lead, out, width)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = lax.bitcast_convert_type(quantized.scale[0][..., 0], jnp.uint16)
    return QTensor(codes, scales, None, format=name, group_size=group_size)
