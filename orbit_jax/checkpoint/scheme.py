"""How one weight is stored: the facts that a checkpoint's configuration and headers give."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
I8, U8, I32, I64 = (np.dtype(t) for t in (np.int8, np.uint8, np.int32, np.int64))
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FLOATS = (BF16, F16, F32)
# Formats whose groups are always of one size.
_GROUPS = {"mxfp4": 32, "mxfp4-blocks": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Scheme:
    """How the weight of a module is stored.

    Attributes:
      format: a key of `formats.FORMATS`.
      bits: of a code, where the format has a choice.
      group: columns that share a scale; 0 for a whole row.
      rows: rows that share a scale; 0 for all.
      symmetric: whether there are no zero points (for GPTQ: whether they are all in the middle).
      scale: the suffix of the tensor of scales, where producers differ.
      minus_one: whether zero codes are stored less one (GPTQ's first version).
      ordered: whether the columns of a group lie side by side (not with GPTQ's act-order).
    """

    format: str
    bits: int = 0
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    scale: str = "weight_scale"
    minus_one: bool = False
    ordered: bool = True

    def words(self) -> str:
        """For messages, as `pack-quantized (4 bits, groups of 32, asymmetric)`."""
        facts = [f"{self.bits} bits"] if self.bits else []
        if self.rows != 1:
            facts.append(f"blocks of {self.rows}x{self.group}" if self.rows else "one scale")
        elif self.format != "plain":
            group = self.group or _GROUPS.get(self.format, 0)
            facts.append(f"groups of {group}" if group else "one group a row")
        if not self.symmetric:
            facts.append("asymmetric")
        if not self.ordered:
            facts.append("act-order")
        return self.format + (f" ({', '.join(facts)})" if facts else "")


PLAIN = Scheme("plain")


@dataclass(frozen=True)
class Stored:
    """A tensor that a weight is stored as: any of these types and shapes; optional or not."""

    dtypes: tuple[np.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
