"""GGUF's tensor types: how the blocks of each become the fields of a `QTensor`.

Bits move, values do not: codes are put into a `QTensor`'s order, signed bytes become unsigned ones,
and the minimum that Q4_K subtracts changes its sign bit. The values of the result are those of the
reference decode in f32, to the last bit: every product is exact there, and at most one sum rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from orbit_jax.quant.qtensor import QTensor, from_float

_LOW_HIGH = np.array([[0], [4]], np.uint8)  # shifts to the two nibbles of a byte


@dataclass(frozen=True)
class BlockType:
    """A tensor type: every `elements` values of a row lie in one block of `nbytes` bytes.

    Attributes:
      unpack: makes the host arrays of one weight from its blocks, uint8 `[out, blocks, nbytes]`.
    """

    name: str
    elements: int
    nbytes: int
    unpack: Callable[[np.ndarray], QTensor]

    @property
    def is_float(self) -> bool:
        """Whether it is a plain float type, which a norm must be."""
        return self.elements == 1


def _floats(dtype: type) -> Callable[[np.ndarray], QTensor]:
    return lambda blocks: from_float(blocks.view(dtype)[..., 0])


def _q4_0(blocks: np.ndarray) -> QTensor:
    """fp16 scale, nibbles; `(code - 8) * scale`."""
    return _halves(_pack4(_nibbles(blocks[..., 2:], 16)), "int4", 32, blocks[..., :2])


def _q4_1(blocks: np.ndarray) -> QTensor:
    """fp16 scale, fp16 minimum, nibbles; `code * scale + minimum`."""
    codes = _pack4(_nibbles(blocks[..., 4:], 16))
    return _halves(codes, "uint4", 32, blocks[..., :2], blocks[..., 2:4])


def _q8_0(blocks: np.ndarray) -> QTensor:
    """fp16 scale, signed bytes; `code * scale`."""
    return _halves(_rows(blocks[..., 2:] ^ 0x80), "int8", 32, blocks[..., :2])


def _q4_k(blocks: np.ndarray) -> QTensor:
    """fp16 scale and minimum of 8 groups, their 6-bit scales and minima, nibbles.

    The value is `code * (scale * s) - minimum * m`.
    """
    low = blocks[..., 4:12].reshape(*blocks.shape[:2], 2, 4)
    high = (blocks[..., None, 12:16] >> _LOW_HIGH) & 15 | (low >> 2) & 0x30
    # The first four groups keep their six bits together, the last four have two of them apart.
    six_bits = np.concatenate([low & 63, high], axis=-1)
    scales = _halves(_pack6(_rows(six_bits[:, :, 0])), "uint6", 8, blocks[..., :2])
    negative = blocks[..., 2:4] ^ np.array([0, 0x80], np.uint8)
    minimum = _halves(_pack6(_rows(six_bits[:, :, 1])), "uint6", 8, negative)
    codes = _pack4(_nibbles(blocks[..., 16:], 32))
    return QTensor(codes, scales, None, "uint4", minimum, group_size=32)


def _q6_k(blocks: np.ndarray) -> QTensor:
    """Nibbles, two more bits a code, signed byte scales of 16 groups, their fp16 scale.

    The value is `(code - 32) * (scale * s)`.
    """
    low = _nibbles(blocks[..., :128], 64)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = (pairs >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
    codes = _pack6(low | (_rows(high) << 4))
    scales = _halves(_rows(blocks[..., 192:208] ^ 0x80), "int8", 16, blocks[..., 208:210])
    return QTensor(codes, scales, None, "int6", group_size=16)


# Every type that can be read, by its number in the file.
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _floats(np.float32)),
    1: BlockType("F16", 1, 2, _floats(np.float16)),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _floats(ml_dtypes.bfloat16)),
}

# Names for the refusal of others.
OTHER_TYPES: dict[int, str] = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


def _halves(
    codes: np.ndarray, form: str, group: int, scales: np.ndarray, minimum: np.ndarray | None = None
) -> QTensor:
    """A QTensor with fp16 scales, and a minimum, given as bytes `[out, groups, 2]`."""
    scales, minimum = (
        None if x is None else np.ascontiguousarray(x).view(np.uint16)[..., 0]
        for x in (scales, minimum)
    )
    return QTensor(codes, scales, None, form, minimum, scale_dtype="float16", group_size=group)


def _rows(parts: np.ndarray) -> np.ndarray:
    """`[out, ...]` to `[out, in]`."""
    return parts.reshape(len(parts), -1)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """`[out, ..., bytes]` to one code a byte: of each run of bytes low nibbles, then high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return _rows((runs >> _LOW_HIGH) & 15)


def _pack4(codes: np.ndarray) -> np.ndarray:
    """`[out, in]` to two neighbours a byte, the low nibble first."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _pack6(codes: np.ndarray) -> np.ndarray:
    """`[out, in]` to a QTensor's 6-bit order: low nibbles, then four pairs of high bits a byte."""
    high = (codes.reshape(len(codes), -1, 4) >> 4) << np.array([0, 2, 4, 6], np.uint8)
    return np.concatenate([_pack4(codes & 15), np.bitwise_or.reduce(high, axis=-1)], axis=1)
