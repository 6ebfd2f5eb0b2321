"""The one matmul: rows of activations times a frozen packed weight.

Two promises are kept here. A row of the result does not depend on how many rows there are or where
it stands, so the log-probs of sampler and trainer can be equal. And the backward pass keeps nothing
but the packed codes: weights are widened again, used and dropped.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.quant.qtensor import QTensor, Unstacked, dequantize, round_to, select

# Kernels for very few rows or columns sum in another order (seen: gemv below 2 rows on AVX2; on AMX
# narrow tiles below 8 rows, and for the 1 or 2 rows that 17, 33 or 66 leave over; outputs narrower
# than 4). Rows are padded to a multiple of the first, columns to at least the second.
_ROW_MULTIPLE = 16
_MIN_COLUMNS = 8


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x[N, in] . w[out, in]^T -> [N, out]` in f32, row-stable; both operands of one dtype.

    The contraction is on the stored orientation: a transpose beside a bf16 dot makes XLA:CPU widen
    the weight and sum in another order. Cotangents are rounded to the operands' dtype, as
    everywhere in mixed precision.
    """
    return _row_stable(x, w, 1)


def dot_across(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x[N, out] . w[out, in] -> [N, in]` in f32: `dot` with the weight the other way round."""
    return _row_stable(x, w, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _row_stable(x: jax.Array, w: jax.Array, over: int) -> jax.Array:
    """`x` times `w`, contracted over its dimension `over`, with rows and columns padded.

    The barriers keep XLA from slicing the padding back off.
    """
    rows, columns = x.shape[0], w.shape[1 - over]
    more_rows, more_columns = -rows % _ROW_MULTIPLE, max(_MIN_COLUMNS - columns, 0)
    if more_rows:
        x = lax.optimization_barrier(jnp.pad(x, ((0, more_rows), (0, 0))))
    if more_columns:
        sides = ((0, more_columns), (0, 0)) if over else ((0, 0), (0, more_columns))
        w = lax.optimization_barrier(jnp.pad(w, sides))
    y = contract(x, w, (1, over))
    if more_rows or more_columns:
        y = lax.optimization_barrier(y)[:rows, :columns]
    return y


def _row_stable_backward(over: int, residual: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple:
    x, w = residual
    g = g.astype(x.dtype)
    of_w = contract(g, x, (0, 0)) if over else contract(x, g, (0, 0))
    return _rounded_now(contract(g, w, (1, 1 - over)), x.dtype), of_w.astype(w.dtype)


_row_stable.defvjp(lambda x, w, over: (_row_stable(x, w, over), (x, w)), _row_stable_backward)


def _rounded_now(moved: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A cotangent in its dtype. Several of one x would wait for their sum in f32 otherwise."""
    return lax.optimization_barrier(moved.astype(dtype))


def contract(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """Two matrices contracted over one dimension each, in f32; its rows may depend on others."""
    # Accelerators would round f32 operands to fewer bits unless told not to.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision, preferred_element_type=jnp.float32)


def matmul(
    x: jax.Array, w: QTensor | Unstacked | jax.Array, index: Sequence[jax.Array | int] = ()
) -> jax.Array:
    """`x[N, in]` times the weight at `index` of the stack `w[..., out, in]`: `[N, out]` in f32.

    A `QTensor` is frozen: the gradient flows to `x` alone. A plain array is an ordinary trainable
    weight (the tiny base is pretrained that way through the same forward pass).
    """
    if isinstance(w, QTensor | Unstacked):
        return _frozen_matmul(x, w, tuple(index))
    return dot(x, w[tuple(index)].astype(x.dtype))


@jax.custom_vjp
def _frozen_matmul(x: jax.Array, q: QTensor | Unstacked, index: tuple) -> jax.Array:
    return _with_weight(dot, x, q, index)


def _forward(x: jax.Array, q: QTensor | Unstacked, index: tuple) -> tuple[jax.Array, tuple]:
    # An empty slice of x carries its dtype to the backward pass at no cost.
    return _frozen_matmul(x, q, index), (x[:0], q, index)


def _backward(residual: tuple, g: jax.Array) -> tuple:
    x, q, index = residual
    g = g.astype(x.dtype)
    moved = _with_weight(lambda g, w: contract(g, w, (1, 0)), g, q, index)
    return _rounded_now(moved, x.dtype), None, None


_frozen_matmul.defvjp(_forward, _backward)


def matmul_exact(
    x: jax.Array, w: QTensor | Unstacked | jax.Array, index: Sequence[jax.Array | int] = ()
) -> jax.Array:
    """`matmul` without rounding an f32 weight to x's dtype: where small differences decide.

    A bf16 `x` goes through the three bf16 pieces that an f32 number is the sum of.
    """
    one = w.layers[0] if isinstance(w, Unstacked) else w
    wide = isinstance(one, QTensor) and one.format == "float32" and x.dtype == jnp.bfloat16
    return _frozen_in_pieces(x, w, tuple(index)) if wide else matmul(x, w, index)


@jax.custom_vjp
def _frozen_in_pieces(x: jax.Array, q: QTensor | Unstacked, index: tuple) -> jax.Array:
    def dots(x: jax.Array, rest: jax.Array) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for _ in range(3):
            piece = round_to(rest, x.dtype)
            rest = rest - piece.astype(jnp.float32)
            total = total + dot(x, piece)
        return total

    return _with_weight(dots, x, q, index, jnp.float32)


_frozen_in_pieces.defvjp(
    lambda x, q, index: (_frozen_in_pieces(x, q, index), (x[:0], q, index)), _backward
)


def matmul_heads(
    x: jax.Array,
    w: QTensor | Unstacked | jax.Array,
    index: Sequence[jax.Array | int],
    rows: tuple[int, int],
    *,
    transposed: bool = False,
) -> jax.Array:
    """Each head's `x[N, H, in]` times its own part of a weight: `[N, H, out]` in f32.

    The rows of the weight at `index` of the stack `w[..., H*P, width]` are H runs of P, of which a
    head takes those from `rows[0]` to before `rows[1]`: from `width` to as many outputs, or, if
    `transposed`, the other way. Frozen and row-stable like `matmul`.
    """
    if isinstance(w, QTensor | Unstacked):
        return _frozen_heads(x, w, tuple(index), rows, transposed)
    return _dot_heads(x, w[tuple(index)].astype(x.dtype), rows, transposed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _frozen_heads(
    x: jax.Array, q: QTensor | Unstacked, index: tuple, rows: tuple[int, int], transposed: bool
) -> jax.Array:
    return _with_weight(lambda x, w: _dot_heads(x, w, rows, transposed), x, q, index)


def _heads_forward(x, q, index, rows, transposed) -> tuple[jax.Array, tuple]:
    return _frozen_heads(x, q, index, rows, transposed), (x[:0], q, index)


def _heads_backward(rows: tuple, transposed: bool, residual: tuple, g: jax.Array) -> tuple:
    x, q, index = residual
    moved = _frozen_heads(g.astype(x.dtype), q, index, rows, not transposed)
    return moved.astype(x.dtype), None, None


_frozen_heads.defvjp(_heads_forward, _heads_backward)


def _dot_heads(x: jax.Array, w: jax.Array, rows: tuple[int, int], transposed: bool) -> jax.Array:
    heads = x.shape[1]
    own = w.reshape(heads, w.shape[0] // heads, -1)[:, rows[0] : rows[1]]
    return swap_leading(jax.vmap(dot_across if transposed else dot)(swap_leading(x), own))


@jax.custom_vjp
def swap_leading(x: jax.Array) -> jax.Array:
    """`x[A, B, C]` as `[B, A, C]`, moved row by row.

    A transpose would become a matter of layout, and a bf16 dot beside it be widened to f32, with
    another order of summation.
    """
    a, b, c = x.shape
    places = jnp.arange(a * b, dtype=jnp.int32).reshape(a, b).T.reshape(-1)
    moved = jnp.take(lax.optimization_barrier(x).reshape(a * b, c), places, axis=0, mode="clip")
    return lax.optimization_barrier(moved).reshape(b, a, c)


swap_leading.defvjp(lambda x: (swap_leading(x), None), lambda _, g: (swap_leading(g),))


def _with_weight(
    fn: Callable,
    x: jax.Array,
    q: QTensor | Unstacked,
    index: tuple,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`fn(x, w)` with the weight at `index` widened to `dtype`, by default that of x."""
    if isinstance(q, QTensor):
        return fn(x, dequantize(select(q, index), dtype or x.dtype))
    layer, *rest = index

    def branch(i: int) -> Callable:
        return lambda x, layers: _with_weight(fn, x, layers[i], tuple(rest), dtype)

    return lax.switch(layer, [branch(i) for i in range(len(q.layers))], x, q.layers)


def over_rows(fn: Callable, tile: int, *arrays: jax.Array):
    """Applies a row-wise `fn` to arrays that share their first dimension N.

    With `tile` 0 this is `fn(*arrays)`. Otherwise rows go through in tiles of that many, one after
    another, each by the same compiled code: equal results for equal rows on any backend, at the
    price of tiling (the `tiles` recipe).
    """
    if not tile:
        return fn(*arrays)
    n = arrays[0].shape[0]
    count = -(-n // tile)

    def split(a: jax.Array) -> jax.Array:
        # By copies of the last row: zeros could be bad arguments (a temperature of 0).
        padded = jnp.pad(a, ((0, count * tile - n),) + ((0, 0),) * (a.ndim - 1), mode="edge")
        return padded.reshape(count, tile, *a.shape[1:])

    out = lax.map(lambda xs: fn(*xs), tuple(split(a) for a in arrays))
    return jax.tree.map(lambda a: a.reshape(count * tile, *a.shape[2:])[:n], out)
