"""Weights in floats of 4 or 8 bits: FP8, NVFP4, MXFP4.

Two codes of 4 bits share a byte, the even element in the low nibble, as in a `QTensor`: no byte of
these formats moves.
"""

import math
from collections.abc import Mapping

import numpy as np

from orbit_jax.checkpoint.scheme import BF16, E4M3, E5M2, E8M0, F16, F32, I8, U8, Scheme, Stored
from orbit_jax.quant.codes import e4m3_numbers
from orbit_jax.quant.qtensor import QTensor

Shape = tuple[int, int]
Tensors = Mapping[str, np.ndarray]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def stored_fp8(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """A scale for blocks of `scheme.rows` by `scheme.group`; bytes of scales are powers of two."""
    out, width = shape
    if scheme.rows == 0:
        scales = ((), (1,), (1, 1))
    elif scheme.group == 0:
        scales = ((out, 1), (out,))
    else:
        scales = ((math.ceil(out / scheme.rows), math.ceil(width / scheme.group)),)
    return {
        "weight": Stored((E4M3, E5M2), (shape,)),
        scheme.scale: Stored((BF16, F16, F32, E8M0, U8), scales),
    }


def unpack_fp8(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Maps of the file, seen as bits."""
    weight, scales = tensors["weight"], tensors[scheme.scale]
    out, width = shape
    if scheme.rows == 0 or scheme.group == 0:
        scales = scales.reshape(-1, 1)
    return QTensor(
        codes=weight.view(np.uint8),
        scales=scales.view(_UNSIGNED[scales.itemsize]),
        offset=None,
        format="e4m3" if weight.dtype == E4M3 else "e5m2",
        scale_dtype=E8M0.name if scales.dtype == U8 else scales.dtype.name,
        group_size=scheme.group or width,
        block_rows=scheme.rows or out,
    )


def stored_nvfp4(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """`scheme.scale` is the suffix of the scale of the tensor, which tells the producers apart."""
    out, width = shape
    return {
        _nvfp4_codes(scheme): Stored((U8,), ((out, width // 2),)),
        "weight_scale": Stored((E4M3,), ((out, width // 16),)),
        scheme.scale: Stored((F32,), ((), (1,))),
    }


def unpack_nvfp4(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """What each byte of the scales stands for is worked out here, once, for both producers.

    A division by one number may become a product with its inverse in some programs; a table of the
    256 results has the same bits in all.
    """
    levels = e4m3_numbers()
    overall = tensors[scheme.scale].reshape(())
    with np.errstate(all="ignore"):
        levels = levels / overall if _divides(scheme) else levels * overall
    return QTensor(
        codes=tensors[_nvfp4_codes(scheme)],
        scales=tensors["weight_scale"].view(np.uint8),
        offset=None,
        format="e2m1",
        scale_dtype=E4M3.name,
        group_size=16,
        levels=levels[None],
    )


def stored_mxfp4(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """DeepSeek-V4 names the codes `weight`, compressed-tensors `weight_packed`."""
    out, width = shape
    return {
        _mxfp4_codes(scheme): Stored((U8, I8), ((out, width // 2),)),
        scheme.scale: Stored((E8M0, U8), ((out, width // 32),)),
    }


def unpack_mxfp4(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Maps of the file, seen as bits."""
    return _powers_of_two(tensors[_mxfp4_codes(scheme)], tensors[scheme.scale])


def stored_mxfp4_blocks(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """gpt-oss: 16 bytes of codes for each scale."""
    out, width = shape
    return {
        "weight_blocks": Stored((U8,), ((out, width // 32, 16),)),
        "weight_scales": Stored((U8,), ((out, width // 32),)),
    }


def unpack_mxfp4_blocks(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Maps of the file, seen as bits."""
    codes = tensors["weight_blocks"].reshape(shape[0], shape[1] // 2)
    return _powers_of_two(codes, tensors["weight_scales"])


def _powers_of_two(codes: np.ndarray, scales: np.ndarray) -> QTensor:
    codes, scales = codes.view(np.uint8), scales.view(np.uint8)
    return QTensor(codes, scales, None, "e2m1", scale_dtype=E8M0.name, group_size=32)


def _divides(scheme: Scheme) -> bool:
    return scheme.scale == "weight_global_scale"


def _nvfp4_codes(scheme: Scheme) -> str:
    return "weight_packed" if _divides(scheme) else "weight"


def _mxfp4_codes(scheme: Scheme) -> str:
    return "weight_packed" if scheme.scale == "weight_scale" else "weight"
