"""A format of weights of one's own, to be copied: what the files hold, and what its bits mean.

    python experiments/ppo_math.py --config.base.path=/path/to/model \\
        --config.base.own="('experiments/own_format.py:halves',)"

A made-up one, `"quant_method": "halves"`: 4 bits in two's complement, a row's left half in the low
nibbles of its bytes and its right half in the high ones, one scale for `group_size` columns. Codes
are put in the order of a `QTensor` once, while loading; nothing is widened, and no value changes.
What `decode` says in plain numpy is what the widened weight must be, bit for bit: test that.
"""

import math
from collections.abc import Mapping

import numpy as np

from orbit_jax.checkpoint.formats import WeightFormat
from orbit_jax.checkpoint.quantization import FindScheme, Method
from orbit_jax.checkpoint.scheme import FLOATS, PLAIN, U8, Scheme, Stored
from orbit_jax.quant.qtensor import QTensor

Shape = tuple[int, int]
Tensors = Mapping[str, np.ndarray]  # by suffix


def stored(scheme: Scheme, shape: Shape) -> dict[str, Stored]:
    """The tensors of a weight `[out, in]`, by suffix: their types and shapes."""
    out, width = shape
    return {
        "weight_codes": Stored((U8,), ((out, width // 2),)),
        "weight_scale": Stored(FLOATS, ((out, width // scheme.group),)),
    }


def unpack(scheme: Scheme, shape: Shape, tensors: Tensors) -> QTensor:
    """Neighbours share a byte, the left one in the low nibble, and code 8 is 0."""
    halves, scales = tensors["weight_codes"], tensors["weight_scale"]
    codes = np.concatenate([halves & 15, halves >> 4], axis=1) ^ 8  # [out, in]
    return QTensor(
        codes=codes[:, 0::2] | codes[:, 1::2] << 4,
        scales=scales.view(np.uint16 if scales.itemsize == 2 else np.uint32),
        offset=None,
        format="int4",
        scale_dtype=scales.dtype.name,
        group_size=scheme.group,
    )


def decode(scheme: Scheme, shape: Shape, tensors: Tensors) -> np.ndarray:
    """The values, f32 `[out, in]`, by another way than `unpack` and `dequantize`."""
    halves = tensors["weight_codes"].view(np.int8)
    numbers = np.concatenate([halves << 4 >> 4, halves >> 4], axis=1)  # signs are extended
    scales = np.repeat(tensors["weight_scale"].astype(np.float32), scheme.group, axis=1)
    return numbers.astype(np.float32) * scales


def read(config: dict) -> FindScheme:
    """From the `quantization_config`, how a module's scheme is found: by the tensors it has."""
    group = config.get("group_size")
    if type(group) is not int or group < 1:
        raise ValueError(f"config.json: group_size={group!r} must be a positive number of columns")
    scheme = Scheme("halves", bits=4, group=group)
    return lambda names, kind, find: scheme if find("weight_codes") else PLAIN


halves = Method(
    "halves",
    read,
    {
        "halves": WeightFormat(
            stored, unpack, decode, divisors=lambda scheme: (1, math.lcm(scheme.group, 2))
        )
    },
)
