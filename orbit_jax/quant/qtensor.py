"""Low-bit tensors: the one way in which the frozen base is held.

A `QTensor` keeps a checkpoint's codes, scales and offsets as unsigned bits, in the checkpoint's own
orientation `[out, in]`, and is widened only for the piece that is being multiplied. bf16, fp16 and
f32 weights travel through the same type as bits, because XLA:CPU would otherwise widen a whole
bf16 stack to f32 and hoist it out of the layer loop.

Leading dimensions (layers, experts) stand before `[out, in]` in every field; `select` indexes them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from orbit_jax.quant.codes import FORMATS, Format, floats_of, unpack, unpack_nibbles
from orbit_jax.quant.subnormal import product

_BITS_DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@struct.dataclass
class QTensor:
    """A frozen weight in its deployed precision.

    Attributes:
      codes: `[..., out, in/2]` uint8 for 4 bits (the low nibble is the even element),
        `[..., out, in/2 + in/4]` uint8 for 6 bits (the low nibbles as for 4 bits, then the high two
        bits of each code, four a byte, lowest first), `[..., out, in]` uint8 for 8 bits, else the
        bits of a float as uint16 or uint32 (in a working copy the floats themselves).
      scales: `[..., out/R, in/G]` bits of `scale_dtype`, one for a block of R rows and G columns of
        which the last may be partial; one row of them serves all rows. Or a `QTensor` of that shape
        where they are themselves quantised (GGUF's K-quants); None for plain floats.
      offset: zero codes of asymmetric formats, packed like the codes but along `out`:
        `[..., ceil(out/2), in/G]` uint8 for 4 bits, `[..., out, in/G]` uint8 for 8; or None.
      format: a key of `FORMATS`.
      minimum: what code 0 of the `uint` formats stands for, held like the scales; or None.
      scale_dtype: name of the float type whose bits `scales` and `minimum` hold.
      group_size: G, the number of elements along `in` that share a scale; 0 for plain floats.
      columns: `[..., 1, in]` int32, the group of each column where it is not its place over G
        (GPTQ's act-order); or None.
      levels: `[..., 1, 256]` f32, what each byte of `scales` stands for where that is a weight's
        own matter (NVFP4's scales under a global one); or None.
      block_rows: R.
      subnormal: whether some product of a code and its scale is below f32's normal range. Hardware
        may flush those to zero, so that such a tensor is multiplied in integers.
    """

    codes: jax.Array
    scales: "jax.Array | QTensor | None"
    offset: jax.Array | None
    format: str = struct.field(pytree_node=False)
    minimum: "jax.Array | QTensor | None" = None
    scale_dtype: str = struct.field(pytree_node=False, default="bfloat16")
    group_size: int = struct.field(pytree_node=False, default=0)
    columns: jax.Array | None = None
    levels: jax.Array | None = None
    block_rows: int = struct.field(pytree_node=False, default=1)
    subnormal: bool = struct.field(pytree_node=False, default=False)

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
    if spec.plain:
        return lax.bitcast_convert_type(q.codes, jnp.dtype(spec.float_dtype)).astype(dtype)
    *lead, out, width = q.shape
    group = q.group_size if _is_regular(q) else 1
    groups = (*lead, out, width // group, -1)
    scales = _per_group(q, q.scales)
    zero = None if spec.zero is None else _zero(q, spec)
    minima = None if q.minimum is None else _per_group(q, q.minimum)
    multiply = product if q.subnormal else jnp.multiply

    def values(codes: jax.Array) -> jax.Array:
        codes = codes.reshape(groups)
        if zero is None:
            numbers = floats_of(codes, q.format)
        else:
            numbers = codes.astype(jnp.float32) - zero
        scaled = multiply(numbers, scales)
        return scaled if minima is None else scaled + minima

    if spec.bits == 4 and jnp.dtype(dtype) == jnp.bfloat16 and group % 2 == 0:
        # Both values of a byte as the two halves of a word: element-wise in the bytes, which a CPU
        # does four times as fast as interleaving codes first.
        low, high = (
            lax.bitcast_convert_type(_rounded(values(codes), dtype), jnp.uint32)
            for codes in (q.codes & 15, q.codes >> 4)
        )
        pairs = lax.bitcast_convert_type(low >> 16 | high, dtype)  # [..., out, in/G, G/2, 2]
        return pairs.reshape(*lead, out, width)
    codes = unpack(q.codes, spec.bits, width)
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
    """Rows of an unstacked `q` (an embedding look-up), still packed.

    Raises:
      ValueError: for 4-bit zero codes, which are packed two rows a byte.
    """
    if q.offset is not None and FORMATS[q.format].bits == 4:
        raise ValueError("take_rows: an embedding with packed zero codes is not supported")

    def take(field: jax.Array | QTensor | None, block: int = 1) -> jax.Array | QTensor | None:
        if isinstance(field, QTensor):
            return take_rows(field, rows)
        if field is None or (block > 1 and field.shape[0] == 1):
            return field
        return jnp.take(field, rows // block if block > 1 else rows, axis=0, mode="clip")

    return q.replace(
        codes=take(q.codes),
        scales=take(q.scales, q.block_rows),
        offset=take(q.offset),
        minimum=take(q.minimum, q.block_rows),
        block_rows=1,
    )


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
    if not FORMATS[q.format].plain:
        q = from_float(dequantize(q, jnp.bfloat16))
    q = q.replace(codes=lax.bitcast_convert_type(q.codes, jnp.dtype(FORMATS[q.format].float_dtype)))
    if q.codes.ndim == 2:
        return q
    return Unstacked(tuple(select(q, (layer,)) for layer in range(q.codes.shape[0])))


def from_float(x: np.ndarray | jax.Array) -> QTensor:
    """Holds a bf16, fp16 or f32 array as its bits (a host array stays on the host)."""
    name = jnp.dtype(x.dtype).name
    if name not in FORMATS or not FORMATS[name].plain:
        raise ValueError(f"from_float: dtype {name} is not one of bfloat16, float16, float32")
    bits = _BITS_DTYPE[FORMATS[name].bits]
    if isinstance(x, np.ndarray):
        return QTensor(codes=x.view(bits), scales=None, offset=None, format=name)
    return QTensor(lax.bitcast_convert_type(x, bits), scales=None, offset=None, format=name)


def _is_regular(q: QTensor) -> bool:
    """Whether every G columns, without a rest, are a group."""
    return q.columns is None and q.shape[-1] % q.group_size == 0


def has_subnormal_products(q: QTensor) -> bool:
    """Whether a host `QTensor` has scales so small that products with its codes are subnormal."""
    spec = FORMATS[q.format]
    if spec.plain or isinstance(q.scales, QTensor):
        return False  # GGUF's scales are fp16 times whole numbers
    scales = q.levels
    if scales is None:
        scales = np.asarray(q.scales).view(jnp.dtype(q.scale_dtype)).astype(np.float32)
    sizes = np.abs(scales)
    return bool(((sizes > 0) & (sizes < np.finfo(np.float32).tiny / spec.smallest)).any())


def _per_group(q: QTensor, held: jax.Array | QTensor) -> jax.Array:
    """Scales or minima of `q` as f32 `[..., out, in/G, 1]`."""
    if isinstance(held, QTensor):
        return dequantize(held, jnp.float32)[..., None]
    if q.levels is not None:
        floats = jnp.take_along_axis(q.levels, held.astype(jnp.int32), -1, mode="clip")
    else:
        floats = lax.bitcast_convert_type(held, jnp.dtype(q.scale_dtype)).astype(jnp.float32)
    return _spread(q, floats)


def _zero(q: QTensor, spec: Format) -> jax.Array:
    """Zero codes of `q` as f32: one for all, or `[..., out, in/G, 1]`."""
    if q.offset is None:
        return jnp.float32(spec.zero)
    zero = unpack_nibbles(q.offset, axis=-2) if spec.bits == 4 else q.offset
    return _spread(q, zero[..., : q.shape[-2], :].astype(jnp.float32))


def _spread(q: QTensor, blocks: jax.Array) -> jax.Array:
    """A value a block to `[..., out, in/G, 1]`, or to `[..., out, in, 1]` if groups vary."""
    out, width = q.shape[-2:]
    if q.block_rows > 1 and blocks.shape[-2] > 1:
        blocks = jnp.repeat(blocks, q.block_rows, axis=-2)[..., :out, :]
    if q.columns is not None:
        blocks = jnp.take_along_axis(blocks, q.columns, -1, mode="clip")
    elif not _is_regular(q):
        blocks = jnp.repeat(blocks, q.group_size, axis=-1)[..., :width]
    return blocks[..., None]
