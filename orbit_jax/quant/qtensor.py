"""Low-bit tensors: the one way in which the frozen base is held.

A `QTensor` keeps a checkpoint's codes, scales and offsets as unsigned bits, in the checkpoint's own
orientation `[out, in]`, and is widened only for the piece that is being multiplied. bf16, fp16 and
f32 weights travel through the same type as bits, because XLA:CPU would otherwise widen a whole
bf16 stack to f32 and hoist it out of the layer loop.

Leading dimensions (layers, experts) stand before `[out, in]` in every field; `select` indexes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax


@dataclass(frozen=True)
class Format:
    """How codes are read: bits of each, and the code that stands for zero (or for the minimum)."""

    bits: int
    zero: int | None  # None: the codes are the bits of a floating point number
    float_dtype: str | None = None


# Every format, one line each. A tensor with an `offset` reads its zero codes from there instead of
# `zero` (compressed-tensors' asymmetric checkpoints).
FORMATS: dict[str, Format] = {
    "int4": Format(bits=4, zero=8),
    "int6": Format(bits=6, zero=32),
    "int8": Format(bits=8, zero=128),
    "uint4": Format(bits=4, zero=0),
    "uint6": Format(bits=6, zero=0),
    "bfloat16": Format(bits=16, zero=None, float_dtype="bfloat16"),
    "float16": Format(bits=16, zero=None, float_dtype="float16"),
    "float32": Format(bits=32, zero=None, float_dtype="float32"),
}

_BITS_DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@struct.dataclass
class QTensor:
    """A frozen weight in its deployed precision.

    Attributes:
      codes: `[..., out, in/2]` uint8 for 4 bits (the low nibble is the even element),
        `[..., out, in/2 + in/4]` uint8 for 6 bits (the low nibbles as for 4 bits, then the high two
        bits of each code, four a byte, lowest first), `[..., out, in]` uint8 for 8 bits, else the
        bits of a float as uint16 or uint32 (in a working copy the floats themselves).
      scales: `[..., out, in/G]` bits of `scale_dtype`, or a `QTensor` of that shape where they are
        themselves quantised (GGUF's K-quants); None for plain floats.
      offset: zero codes of asymmetric formats, packed like the codes but along `out`:
        `[..., ceil(out/2), in/G]` uint8 for 4 bits, `[..., out, in/G]` uint8 for 8; or None.
      format: a key of `FORMATS`.
      minimum: what code 0 of the `uint` formats stands for, held like the scales; or None.
      scale_dtype: name of the float type whose bits `scales` and `minimum` hold.
      group_size: G, the number of elements along `in` that share a scale; 0 for plain floats.
    """

    codes: jax.Array
    scales: "jax.Array | QTensor | None"
    offset: jax.Array | None
    format: str = struct.field(pytree_node=False)
    minimum: "jax.Array | QTensor | None" = None
    scale_dtype: str = struct.field(pytree_node=False, default="bfloat16")
    group_size: int = struct.field(pytree_node=False, default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape `[..., out, in]`."""
        *lead, last = self.codes.shape
        return (*lead, last * 8 // min(FORMATS[self.format].bits, 8))

    @property
    def nbytes(self) -> int:
        """Bytes held, all fields together."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def dequantize(q: QTensor, dtype: jnp.dtype) -> jax.Array:
    """Widens `q` to `[..., out, in]` of `dtype`: `(code - zero) * scale + minimum`, in f32.

    There is one rounding, at the end, made with `reduce_precision`: a plain `astype` may be
    dropped by XLA, which would leave more precision in one program than in another. Where there is
    a minimum, scales have at most 17 significant bits (an fp16, or one times a 6-bit code), so the
    product is exact and a fused multiply-add gives the bits of the separate operations.
    """
    spec = FORMATS[q.format]
    if spec.zero is None:
        return lax.bitcast_convert_type(q.codes, jnp.dtype(spec.float_dtype)).astype(dtype)
    *lead, out, width = q.shape
    groups = (*lead, out, width // q.group_size, -1)
    if q.offset is None:
        zero = jnp.float32(spec.zero)
    else:
        zero = _unpack_nibbles(q.offset, axis=-2) if spec.bits == 4 else q.offset
        zero = zero[..., :out, :, None].astype(jnp.float32)
    scales = _per_group(q, q.scales)
    minima = None if q.minimum is None else _per_group(q, q.minimum)

    def values(codes: jax.Array) -> jax.Array:
        product = (codes.reshape(groups).astype(jnp.float32) - zero) * scales
        return product if minima is None else product + minima

    if spec.bits == 4 and jnp.dtype(dtype) == jnp.bfloat16 and q.group_size % 2 == 0:
        # Both values of a byte as the two halves of a word: element-wise in the bytes, which a CPU
        # does four times as fast as interleaving codes first.
        low, high = (
            lax.bitcast_convert_type(_rounded(values(codes), dtype), jnp.uint32)
            for codes in (q.codes & 15, q.codes >> 4)
        )
        pairs = lax.bitcast_convert_type(low >> 16 | high, dtype)  # [..., out, in/G, G/2, 2]
        return pairs.reshape(*lead, out, width)
    codes = _unpack(q.codes, spec.bits, width)
    return round_to(values(codes).reshape(*lead, out, width), dtype)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds f32 `x` to `dtype` in a way that the compiler may not undo."""
    return _rounded(x, dtype).astype(dtype)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 `x` rounded to a value of `dtype`, still as f32."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def select(q: QTensor, index: Sequence[jax.Array | int]) -> QTensor:
    """The tensor at `index` of the leading (layer, expert) dimensions, read as one slice.

    The stack itself stays where it is: only the bits of the selected tensor are read, which is what
    keeps a decode step of a sparse model at the cost of its active experts.
    """

    def one(leaf: jax.Array) -> jax.Array:
        rest = leaf.shape[len(index) :]
        start = (*index, *(0 for _ in rest))
        return lax.dynamic_slice(leaf, start, (1,) * len(index) + rest).reshape(rest)

    return jax.tree.map(one, q) if index else q


def take_rows(q: QTensor, rows: jax.Array) -> QTensor:
    """Rows of an unstacked `q` (an embedding look-up), still packed."""
    if q.offset is not None:
        raise ValueError("take_rows: an embedding with packed zero codes is not supported")
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), q)


@struct.dataclass
class Unstacked:
    """A stack of weights with an array of its own for each layer.

    A matmul then reads its weight where it lies. Out of a stack it would be copied first: as much
    memory traffic again as reading it, in every step of a decoding loop.
    """

    layers: tuple[QTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the stack, `[L, ..., out, in]`."""
        return (len(self.layers), *self.layers[0].shape)


def working_copy(q: QTensor) -> QTensor | Unstacked:
    """The same weight in bf16 and unstacked: faster to read, up to four times as large.

    Dequantising is element-wise, so a product with the copy has the bits of one with the codes.
    Weights that are floats already keep their type.
    """
    if FORMATS[q.format].zero is not None:
        q = from_float(dequantize(q, jnp.bfloat16))
    q = q.replace(codes=lax.bitcast_convert_type(q.codes, jnp.dtype(FORMATS[q.format].float_dtype)))
    if q.codes.ndim == 2:
        return q
    return Unstacked(tuple(select(q, (layer,)) for layer in range(q.codes.shape[0])))


def from_float(x: np.ndarray | jax.Array) -> QTensor:
    """Holds a bf16, fp16 or f32 array as its bits (a host array stays on the host)."""
    name = jnp.dtype(x.dtype).name
    if name not in FORMATS or FORMATS[name].zero is not None:
        raise ValueError(f"from_float: dtype {name} is not one of bfloat16, float16, float32")
    bits = _BITS_DTYPE[FORMATS[name].bits]
    if isinstance(x, np.ndarray):
        return QTensor(codes=x.view(bits), scales=None, offset=None, format=name)
    return QTensor(lax.bitcast_convert_type(x, bits), scales=None, offset=None, format=name)


def _per_group(q: QTensor, held: jax.Array | QTensor) -> jax.Array:
    """Scales or minima of `q` as f32 `[..., out, in/G, 1]`."""
    if isinstance(held, QTensor):
        return dequantize(held, jnp.float32)[..., None]
    floats = lax.bitcast_convert_type(held, jnp.dtype(q.scale_dtype))
    return floats.astype(jnp.float32)[..., None]


def _unpack(packed: jax.Array, bits: int, width: int) -> jax.Array:
    """The codes of 4, 6 or 8 bits, one a byte: `[..., width]` uint8."""
    if bits == 8:
        return packed
    codes = _unpack_nibbles(packed[..., : width // 2], axis=-1)
    if bits == 6:
        high = packed[..., width // 2 :, None] >> jnp.arange(0, 8, 2, dtype=jnp.uint8) & 3
        codes |= high.reshape(codes.shape) << 4
    return codes


def _unpack_nibbles(packed: jax.Array, axis: int) -> jax.Array:
    """Two 4-bit codes a byte, low nibble first, to one code a byte along `axis` (-1 or -2)."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=axis)
    shape = list(packed.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)
