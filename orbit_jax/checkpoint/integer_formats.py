"""Weights in whole numbers of 4 or 8 bits: compressed-tensors, GPTQ, AWQ.

All pack codes into int32 words; on a little-endian host, as JAX's are, a word is its bytes in
order. compressed-tensors fills words along `in` with the lowest bits first, so that a row's words
are the bytes of a `QTensor`. GPTQ does so in the transposed orientation, AWQ along `out` in an
order of its own; both are turned, whole codes at a time.
"""

import math
from collections.abc import Mapping

import numpy as np

from orbit_jax.checkpoint.scheme import F16, FLOATS, I8, I32, I64, Scheme, Stored
from orbit_jax.quant.qtensor import QTensor

Shape = tuple[int, int]
Tensors = Mapping[str, np.ndarray]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, lowest first


def stored_words(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """compressed-tensors `pack-quantized`: zero points are packed along `out`."""
    out, width = shape
    groups = width // (scheme.group or width)
    stored = {
        "weight_packed": Stored((I32,), ((out, math.ceil(width * scheme.bits / 32)),)),
        "weight_scale": Stored(FLOATS, ((out, groups),)),
        "weight_shape": Stored((I64, I32), ((2,),)),
    }
    if not scheme.symmetric:
        words = math.ceil(out * scheme.bits / 32)
        stored["weight_zero_point"] = Stored((I32,), ((words, groups),))
    return stored


def unpack_words(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """No byte moves but those of zero points."""
    out, width = shape
    offset = None
    if not scheme.symmetric:
        offset = offset_from_words(tensors["weight_zero_point"], out, scheme.bits)
    codes = tensors["weight_packed"].view(np.uint8)[:, : width * scheme.bits // 8]
    return _integers(scheme, shape, codes, tensors["weight_scale"], offset)


def stored_bytes(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """compressed-tensors `int-quantized`."""
    scales = ((), (1,), (1, 1)) if scheme.rows == 0 else ((shape[0], 1), (shape[0],))
    return {"weight": Stored((I8,), (shape,)), "weight_scale": Stored(FLOATS, scales)}


def unpack_bytes(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Signed bytes become unsigned ones."""
    codes = tensors["weight"].view(np.uint8) ^ np.uint8(0x80)
    return _integers(scheme, shape, codes, tensors["weight_scale"].reshape(-1, 1), None)


def stored_gptq(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """Everything stands transposed; `g_idx` is the group of each column."""
    out, width = shape
    groups, codes = width // (scheme.group or width), 32 // scheme.bits
    return {
        "qweight": Stored((I32,), ((width // codes, out),)),
        "qzeros": Stored((I32,), ((groups, out // codes),)),
        "scales": Stored((F16, *FLOATS), ((groups, out),)),
        "g_idx": Stored((I32,), ((width,),), optional=True),
    }


def unpack_gptq(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Turns codes; keeps the groups of columns only where they are not in order."""
    codes = np.ascontiguousarray(tensors["qweight"].T).view(np.uint8)
    offset = np.ascontiguousarray(tensors["qzeros"]).view(np.uint8).T
    if scheme.minus_one and scheme.bits == 4:
        offset = (offset + 1 & 15) | ((offset & 0xF0) + 0x10 & 0xF0)
    elif scheme.minus_one:
        offset = offset + np.uint8(1)
    if scheme.symmetric:
        offset = _no_offset(scheme, offset)
    scales = np.ascontiguousarray(tensors["scales"].T)
    q = _integers(scheme, shape, codes, scales, offset)
    if scheme.ordered:
        return q
    columns = tensors["g_idx"]
    groups = scales.shape[1]
    if columns.min() < 0 or columns.max() >= groups:
        raise ValueError(
            f"g_idx names group {int(columns.max())} or {int(columns.min())} of {groups}: "
            "download the checkpoint again"
        )
    return q.replace(columns=np.ascontiguousarray(columns)[None])


def stored_awq(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """Everything stands transposed."""
    out, width = shape
    groups = width // (scheme.group or width)
    return {
        "qweight": Stored((I32,), ((width, out // 8),)),
        "qzeros": Stored((I32,), ((groups, out // 8),)),
        "scales": Stored((F16, *FLOATS), ((groups, out),)),
    }


def unpack_awq(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Puts codes in order, and turns them."""
    codes, zeros = (_awq_codes(tensors[name]) for name in ("qweight", "qzeros"))
    packed = np.ascontiguousarray((codes[0::2] | codes[1::2] << 4).T)
    offset = np.ascontiguousarray((zeros[:, 0::2] | zeros[:, 1::2] << 4).T)
    scales = np.ascontiguousarray(tensors["scales"].T)
    return _integers(scheme, shape, packed, scales, offset)


def offset_from_words(words: np.ndarray, out: int, bits: int) -> np.ndarray:
    """int32 `[ceil(out*bits/32), in/G]` to the uint8 offset `[ceil(out*bits/8), in/G]`."""
    count, groups = words.shape
    by_row = words.view(np.uint8).reshape(count, groups, 4).swapaxes(1, 2)
    return by_row.reshape(count * 4, groups)[: math.ceil(out * bits / 8)]


def words_from_codes(codes: np.ndarray) -> np.ndarray:
    """A QTensor's codes as int32 words of `pack-quantized`; bits past the width are 0."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    return np.ascontiguousarray(padded).view(np.int32)


def words_from_offset(offset: np.ndarray) -> np.ndarray:
    """The inverse of `offset_from_words`; bits past the last row are 0."""
    padded = np.pad(offset, ((0, -offset.shape[0] % 4), (0, 0)))
    by_word = padded.reshape(-1, 4, padded.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(by_word).view(np.int32)[..., 0]


def _integers(
    scheme: Scheme, shape: Shape, codes: np.ndarray, scales: np.ndarray, offset: np.ndarray | None
) -> QTensor:
    return QTensor(
        codes=codes,
        scales=scales.view(np.uint16 if scales.itemsize == 2 else np.uint32),
        offset=offset,
        format=f"int{scheme.bits}",
        scale_dtype=scales.dtype.name,
        group_size=scheme.group or shape[1],
        block_rows=scheme.rows or shape[0],
    )


def _no_offset(scheme: Scheme, offset: np.ndarray) -> None:
    """Zero codes of a symmetric weight are those that the format has without any."""
    middle = 0x88 if scheme.bits == 4 else 0x80
    if not (offset == middle).all():
        raise ValueError(
            "qzeros are not all in the middle though config.json says sym=true: correct sym or "
            "checkpoint_format in its quantization_config"
        )


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """int32 `[n, out/8]` to one code a byte, `[n, out]`."""
    nibbles = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((*words.shape, 8), np.uint8)
    for place, column in enumerate(_AWQ_ORDER):
        codes[..., column] = nibbles[:, place // 2 :: 4] >> 4 * (place % 2) & 15
    return codes.reshape(len(words), -1)
