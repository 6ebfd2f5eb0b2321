"""What stored weights are worth: each format's decode in plain numpy, one step after another.

Slow, and written apart from the way in which weights are held and widened: tests compare the two.
Each function takes a scheme, a shape `(out, in)` and the stored tensors by suffix, and gives f32
`[out, in]`, each value rounded once.
"""

from collections.abc import Mapping

import numpy as np

from orbit_jax.checkpoint.scheme import E4M3, E8M0, Scheme

Shape = tuple[int, int]
Tensors = Mapping[str, np.ndarray]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column of a word


def plain(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """The floats themselves."""
    return tensors["weight"].astype(np.float32)


def words(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """compressed-tensors `pack-quantized`."""
    out, width = shape
    group = scheme.group or width
    codes = _from_words(tensors["weight_packed"], scheme.bits)[:, :width]
    zeros = np.full((out, width // group), 2 ** (scheme.bits - 1))
    if not scheme.symmetric:
        zeros = _from_words(tensors["weight_zero_point"].T, scheme.bits).T[:out]
    return _times(codes - _wide(zeros, 1, group, shape), tensors["weight_scale"], 1, group, shape)


def signed_bytes(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """compressed-tensors `int-quantized`."""
    scales = tensors["weight_scale"].reshape(-1, 1)
    return _times(tensors["weight"], scales, scheme.rows or shape[0], shape[1], shape)


def gptq(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """GPTQ."""
    width = shape[1]
    codes = _from_words(tensors["qweight"].T, scheme.bits)
    zeros = _from_words(tensors["qzeros"], scheme.bits) + scheme.minus_one
    groups = tensors.get("g_idx", np.arange(width) // (scheme.group or width))
    zeros = (zeros % 2**scheme.bits)[groups].T
    return ((codes - zeros) * tensors["scales"].astype(np.float32)[groups].T).astype(np.float32)


def awq(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """AWQ."""
    group = scheme.group or shape[1]
    codes, zeros = (
        _from_words(tensors[name], 4).reshape(len(tensors[name]), -1, 8)[..., list(_AWQ_PLACE)]
        for name in ("qweight", "qzeros")
    )
    codes, zeros = (x.reshape(len(x), -1).T for x in (codes, zeros))
    return _times(codes - _wide(zeros, 1, group, shape), tensors["scales"].T, 1, group, shape)


def fp8(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """Eight-bit floats, scales of any kind."""
    scales = tensors[scheme.scale]
    if scales.dtype == np.uint8:
        scales = scales.view(E8M0)
    if not (scheme.rows and scheme.group):
        scales = scales.reshape(-1, 1)
    rows, group = scheme.rows or shape[0], scheme.group or shape[1]
    return _times(tensors["weight"].astype(np.float32), scales, rows, group, shape)


def nvfp4(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """Four-bit floats under two levels of scales."""
    scales = tensors["weight_scale"].view(E4M3).astype(np.float32)
    if "weight_global_scale" in tensors:
        scales = scales / tensors["weight_global_scale"].reshape(())
        return _times(_pairs(tensors["weight_packed"]), scales, 1, 16, shape)
    scales = scales * tensors["weight_scale_2"].reshape(())
    return _times(_pairs(tensors["weight"]), scales, 1, 16, shape)


def mxfp4(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """Four-bit floats under powers of two."""
    codes = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    return _scaled_by_powers(codes, tensors[scheme.scale], shape)


def mxfp4_blocks(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """The same in gpt-oss's blocks."""
    codes = tensors["weight_blocks"].reshape(shape[0], -1)
    return _scaled_by_powers(codes, tensors["weight_scales"], shape)


def _scaled_by_powers(codes: np.ndarray, scales: np.ndarray, shape: Shape) -> np.ndarray:
    exponents = scales.view(np.uint8).astype(np.int32)
    with np.errstate(all="ignore"):
        values = np.ldexp(_pairs(codes), _wide(exponents - 127, 1, 32, shape))
    return np.where(_wide(exponents, 1, 32, shape) == 255, np.float32(np.nan), values)


def _from_words(packed: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[n, words]` to one code each, lowest bits first: int64 `[n, words * 32 / bits]`."""
    shifts = np.arange(0, 32, bits)
    codes = packed.astype(np.int64)[..., None] >> shifts & 2**bits - 1
    return codes.reshape(len(packed), -1)


def _pairs(packed: np.ndarray) -> np.ndarray:
    """Bytes `[out, in/2]` to the four-bit floats in them, the low nibble first: f32 `[out, in]`."""
    codes = np.repeat(packed.view(np.uint8), 2, axis=1)
    codes[:, 1::2] >>= 4
    return np.where(codes & 8, np.float32(-1), np.float32(1)) * _E2M1[codes & 7]


def _wide(blocks: np.ndarray, rows: int, group: int, shape: Shape) -> np.ndarray:
    """A value for each block to one for each weight; the last blocks may be cut short."""
    each = np.repeat(np.repeat(blocks, rows, axis=0), group, axis=1)
    return each[: shape[0], : shape[1]]


def _times(
    numbers: np.ndarray, scales: np.ndarray, rows: int, group: int, shape: Shape
) -> np.ndarray:
    scales = _wide(scales.astype(np.float32), rows, group, shape)
    with np.errstate(all="ignore"):
        return numbers.astype(np.float32) * scales
