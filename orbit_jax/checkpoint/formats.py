"""The deployed weight formats: what a file holds for one weight, and what its bits mean.

One table for all of them. An entry says which tensors a weight `[out, in]` is stored as, how they
become the fields of a `QTensor` (bits move, values do not, and where the layouts agree nothing is
copied), and, written apart from `dequantize`, what value each weight has. A format more is an entry
more here and a golden more in its test; one's own is an entry of a `quantization.Method`.

Activations are never quantised: of a checkpoint made for that (W8A8, W4A4) the weights are used,
and its activation scales are left unread.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from orbit_jax.checkpoint import float_formats, integer_formats, reference_decode
from orbit_jax.checkpoint.scheme import FLOATS, PLAIN, Scheme, Stored
from orbit_jax.quant.qtensor import QTensor, from_float, has_subnormal_products

Shape = tuple[int, int]
Tensors = Mapping[str, np.ndarray]  # by suffix, as `weight_scale`


@dataclass(frozen=True)
class WeightFormat:
    """One deployed format.

    Attributes:
      stored: suffix of each tensor of a weight `[out, in]` to what it may be.
      unpack: the `QTensor` of host arrays that those tensors are; `subnormal` is not set.
      decode: the values, f32 `[out, in]`, in plain numpy.
      divisors: what `out` and `in` must be multiples of.
    """

    stored: Callable[[Scheme, Shape], dict[str, Stored]]
    unpack: Callable[[Scheme, Shape, Tensors], QTensor]
    decode: Callable[[Scheme, Shape, Tensors], np.ndarray]
    divisors: Callable[[Scheme], Shape] = field(default=lambda scheme: (1, 1))


FORMATS: dict[str, WeightFormat] = {
    # bf16, fp16 or f32.
    "plain": WeightFormat(
        stored=lambda scheme, shape: {"weight": Stored(FLOATS, (shape,))},
        unpack=lambda scheme, shape, tensors: from_float(tensors["weight"]),
        decode=reference_decode.plain,
    ),
    # compressed-tensors, 4 or 8 bits in groups or by channel, with or without zero points.
    "pack-quantized": WeightFormat(
        stored=integer_formats.stored_words,
        unpack=integer_formats.unpack_words,
        decode=reference_decode.words,
        divisors=lambda scheme: (1, math.lcm(scheme.group or 1, 8 // scheme.bits)),
    ),
    # compressed-tensors, signed bytes by channel or for the whole tensor.
    "int-quantized": WeightFormat(
        stored=integer_formats.stored_bytes,
        unpack=integer_formats.unpack_bytes,
        decode=reference_decode.signed_bytes,
    ),
    # GPTQ of either version, 4 or 8 bits, with or without act-order.
    "gptq": WeightFormat(
        stored=integer_formats.stored_gptq,
        unpack=integer_formats.unpack_gptq,
        decode=reference_decode.gptq,
        divisors=lambda scheme: (32 // scheme.bits, math.lcm(scheme.group or 1, 32 // scheme.bits)),
    ),
    # AWQ's `gemm` packing.
    "awq": WeightFormat(
        stored=integer_formats.stored_awq,
        unpack=integer_formats.unpack_awq,
        decode=reference_decode.awq,
        divisors=lambda scheme: (8, math.lcm(scheme.group or 1, 2)),
    ),
    # Eight-bit floats with scales for blocks, groups, channels or the whole tensor: DeepSeek and
    # Qwen (`weight_scale_inv`), compressed-tensors `float-quantized` and `mxfp8-quantized`,
    # ModelOpt FP8.
    "fp8": WeightFormat(
        stored=float_formats.stored_fp8,
        unpack=float_formats.unpack_fp8,
        decode=reference_decode.fp8,
    ),
    # Four-bit floats under scales of 8 bits for 16 columns under one scale for the tensor:
    # ModelOpt multiplies by that one, compressed-tensors divides.
    "nvfp4": WeightFormat(
        stored=float_formats.stored_nvfp4,
        unpack=float_formats.unpack_nvfp4,
        decode=reference_decode.nvfp4,
        divisors=lambda scheme: (1, 16),
    ),
    # Four-bit floats under powers of two for 32 columns: pairs in a byte, as compressed-tensors
    # and DeepSeek-V4's experts hold them, or gpt-oss's blocks of 16 bytes.
    "mxfp4": WeightFormat(
        stored=float_formats.stored_mxfp4,
        unpack=float_formats.unpack_mxfp4,
        decode=reference_decode.mxfp4,
        divisors=lambda scheme: (1, 32),
    ),
    "mxfp4-blocks": WeightFormat(
        stored=float_formats.stored_mxfp4_blocks,
        unpack=float_formats.unpack_mxfp4_blocks,
        decode=reference_decode.mxfp4_blocks,
        divisors=lambda scheme: (1, 32),
    ),
}
FORMATS_OF_PACKAGE = frozenset(FORMATS)


def stored_tensors(scheme: Scheme, shape: tuple[int, ...]) -> dict[str, Stored]:
    """What a checkpoint holds for one weight: suffix to the types and shapes it may have."""
    return FORMATS[scheme.format].stored(scheme, shape)


def unpack(scheme: Scheme, shape: tuple[int, ...], tensors: Tensors) -> QTensor:
    """The packed weight of host arrays that stored tensors are.

    Raises:
      ValueError: if the tensors contradict the scheme.
    """
    q = FORMATS[scheme.format].unpack(scheme, shape, tensors)
    return q.replace(subnormal=has_subnormal_products(q))


def decode(scheme: Scheme, shape: tuple[int, ...], tensors: Tensors) -> np.ndarray:
    """The values of a weight, f32 `[out, in]`, by plain numpy: what `dequantize` must give."""
    return FORMATS[scheme.format].decode(scheme, shape, tensors)


def bytes_per_weight(scheme: Scheme, shape: Shape) -> float:
    """Bytes of the stored tensors over the weights they hold, in the first type of each."""
    parts = [part for part in stored_tensors(scheme, shape).values() if not part.optional]
    total = sum(math.prod(part.shapes[0]) * part.dtypes[0].itemsize for part in parts)
    return total / math.prod(shape)


def check_shape(module: str, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Refuses a weight that its format cannot hold.

    Raises:
      ValueError: if groups or packed codes do not divide the shape.
    """
    if scheme == PLAIN:
        return
    for name, size, divisor in zip(
        ("output", "input"), shape, FORMATS[scheme.format].divisors(scheme), strict=True
    ):
        if size % divisor:
            raise ValueError(
                f"{module}: the {name} width {size} is not a multiple of {divisor}, which "
                f"{scheme.words()} needs: keep this module plain, or choose another group size"
            )
