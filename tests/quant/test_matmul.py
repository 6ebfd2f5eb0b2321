"""The one matmul: rows that do not know each other, and a backward pass that keeps only codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from orbit_jax import compile as programs
from orbit_jax.quant.matmul import dot, matmul, matmul_exact, over_rows
from orbit_jax.quant.qtensor import QTensor, Unstacked, dequantize, from_float, working_copy
from orbit_jax.quant.quantize import quantize

ROWS = 128
# Outputs narrower than a kernel's tile, inputs that are no multiple of 32.
SHAPES = [(32, 1), (80, 7), (64, 8), (100, 52), (256, 288), (64, 1000)]


def gaussian(seed: int, *shape: int, dtype=jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


@functools.cache
def weights() -> list[QTensor]:
    """For each of SHAPES a weight in 4 bits, 8 bits or bf16."""
    make = jax.jit(quantize, static_argnums=(1, 2))
    out = []
    for i, (width, rows) in enumerate(SHAPES):
        w = gaussian(i, rows, width)
        floats = jax.tree.map(jnp.asarray, from_float(w.astype(jnp.bfloat16)))
        out.append(floats if i % 3 == 2 else make(w, (4, 8)[i % 3], 4))
    return out


def products(xs: list[jax.Array], qs: list[QTensor]) -> list[jax.Array]:
    return [matmul(x, q) for x, q in zip(xs, qs, strict=True)]


@functools.cache
def inputs() -> list[jax.Array]:
    return [
        gaussian(100 + i, ROWS, width, dtype=jnp.bfloat16) for i, (width, _) in enumerate(SHAPES)
    ]


@functools.cache
def program(recipe: str = "fast") -> programs.Program:
    return programs.jit(products, programs.options(recipe))


@functools.cache
def all_rows() -> list[np.ndarray]:
    return jax.device_get(program()(inputs(), weights()))


def test_an_exact_product_does_not_round_an_f32_weight():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((40, 96), np.float32)).astype(jnp.bfloat16)
    w = rng.standard_normal((2, 12, 96), np.float32)
    q = jax.tree.map(jnp.asarray, from_float(w))
    wanted = np.asarray(x, np.float64) @ w[1].astype(np.float64).T
    exact, rounded = (jax.jit(fn)(x, q, (1,)) for fn in (matmul_exact, matmul))
    assert np.abs(exact - wanted).max() < 2e-5 < 1e-3 < np.abs(rounded - wanted).max()
    np.testing.assert_array_equal(jax.jit(matmul_exact)(x[5:6], q, (1,))[0], exact[5])
    copied = jax.jit(matmul_exact)(x, working_copy(q), (1,))
    np.testing.assert_array_equal(copied, exact)
    gradients = [
        jax.grad(lambda x, fn=fn: fn(x, q, (1,)).sum())(x) for fn in (matmul_exact, matmul)
    ]
    np.testing.assert_array_equal(*(np.asarray(g, np.float32) for g in gradients))


def test_products_are_those_of_the_dequantised_weights():
    widen = jax.jit(lambda qs: [dequantize(q, jnp.bfloat16) for q in qs])
    for x, w, y in zip(inputs(), widen(weights()), all_rows(), strict=True):
        w = np.asarray(w, np.float64)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, np.asarray(x, np.float64) @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 18, 33])
def test_a_row_does_not_depend_on_how_many_there_are(rows):
    for place in (0, ROWS - rows, 40):
        some = program()([x[place : place + rows] for x in inputs()], weights())
        for shape, few, many in zip(SHAPES, some, all_rows(), strict=True):
            np.testing.assert_array_equal(few, many[place : place + rows], err_msg=str(shape))


def test_a_row_does_not_depend_on_where_it_stands():
    order = np.random.default_rng(1).permutation(ROWS)
    moved = program()([x[order] for x in inputs()], weights())
    for shape, y, many in zip(SHAPES, moved, all_rows(), strict=True):
        np.testing.assert_array_equal(y, many[order], err_msg=str(shape))


def test_a_row_alone_in_a_loop_equals_it_among_all():
    """Decode multiplies inside a loop, one row at a time at worst."""

    def one_by_one(xs, qs):
        return lax.map(lambda x: products([x] if len(qs) == 1 else list(x), qs), tuple(xs))

    run = programs.jit(one_by_one, programs.options("fast"))
    ys = run([x[:, None] for x in inputs()], weights())
    for shape, y, many in zip(SHAPES, ys, all_rows(), strict=True):
        np.testing.assert_array_equal(y[:, 0], many, err_msg=str(shape))


def test_rows_that_hold_anything_else_do_not_matter():
    spoilt = [np.array(x) for x in inputs()]
    for x in spoilt:
        x[1::2] = np.nan
    for y, many in zip(program()(spoilt, weights()), all_rows(), strict=True):
        np.testing.assert_array_equal(y[0::2], many[0::2])


def test_a_working_copy_gives_the_same_products():
    copies = jax.jit(lambda qs: [working_copy(q) for q in qs])(weights())
    assert {q.format for q in copies} == {"bfloat16"}
    for y, many in zip(program()(inputs(), copies), all_rows(), strict=True):
        np.testing.assert_array_equal(y, many)


@functools.cache
def stack() -> QTensor:
    """`[2, 3, 24, 64]` in 4 bits."""
    return jax.jit(quantize, static_argnums=(1, 2))(gaussian(5, 2, 3, 24, 64), 4, 16)


def test_a_weight_of_a_stack_is_found_by_its_index():
    x = gaussian(6, 20, 64, dtype=jnp.bfloat16)
    w = jax.jit(dequantize, static_argnums=1)(stack(), jnp.bfloat16)[1, 2]
    y = jax.jit(matmul)(x, stack(), (np.int32(1), np.int32(2)))
    expected = x.astype(np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_gradient_to_x_is_that_of_the_dequantised_weight(dtype, tolerance, rows):
    x, g = gaussian(6, rows, 64, dtype=dtype), gaussian(7, rows, 24)

    def ours(x: jax.Array) -> jax.Array:
        return (matmul(x, stack(), (1, 0)) * g).sum()

    def reference(x: jax.Array) -> jax.Array:
        w = dequantize(stack(), dtype)[1, 0].astype(jnp.float32)
        return (jnp.matmul(x.astype(jnp.float32), w.T, precision="highest") * g).sum()

    got, expected = (jax.jit(jax.grad(f))(x) for f in (ours, reference))
    assert got.dtype == dtype
    scale = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(
        got.astype(np.float32), expected.astype(np.float32), rtol=0, atol=2 * tolerance * scale
    )


def test_a_working_copy_of_a_stack_gives_the_same_products_and_gradients():
    x, g = gaussian(6, 20, 64, dtype=jnp.bfloat16), gaussian(7, 20, 24)

    def run(x: jax.Array, w: QTensor | Unstacked, index: tuple) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(lambda x: matmul(x, w, index), x)
        return y, *backward(g)

    copy = working_copy(stack())
    for layer in range(2):
        index = (np.int32(layer), np.int32(2))
        for a, b in zip(*(jax.jit(run)(x, w, index) for w in (stack(), copy)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_base_gets_no_gradient():
    x = gaussian(6, 20, 64, dtype=jnp.bfloat16)
    total = jax.jit(lambda q: matmul(x, q, (1, 0)).sum())
    gradient = jax.grad(total, allow_int=True)(stack())
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jax.dtypes.float0}


def test_the_residual_is_the_packed_codes_alone():
    q = stack()
    x = gaussian(6, 20, 64, dtype=jnp.bfloat16)
    _, backward = jax.jit(lambda x, q: jax.vjp(lambda x: matmul(x, q, (1, 0)), x))(x, q)
    kept = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0)]
    floats = [leaf for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert not floats, "neither activations nor widened weights are kept"
    assert sum(leaf.nbytes for leaf in kept) <= q.nbytes + 64


def test_a_plain_array_is_an_ordinary_trainable_weight():
    x, w, g = gaussian(1, 20, 64), gaussian(2, 3, 24, 64), gaussian(3, 20, 24)
    gradient = jax.jit(jax.grad(lambda w: (matmul(x, w, (2,)) * g).sum()))(w)
    np.testing.assert_allclose(gradient[2], g.T @ x, rtol=1e-4, atol=1e-4)
    assert not gradient[:2].any()


def test_gradients_of_a_dot_of_two_arrays():
    for rows, out in [(1, 4), (40, 24)]:
        x, w, g = gaussian(1, rows, 64), gaussian(2, out, 64), gaussian(3, rows, out)
        loss = lambda x, w, g=g: (dot(x, w) * g).sum()  # noqa: E731
        dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
        np.testing.assert_allclose(dx, g @ w, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dw, g.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_tiles_change_nothing_but_the_order_of_work(rows):
    x, y = gaussian(1, rows, 6), gaussian(2, rows)

    def fn(x: jax.Array, y: jax.Array):
        assert x.shape[0] in (rows, 16)
        return x * y[:, None], {"sum": x.sum(axis=1)}

    whole, tiled = (jax.jit(lambda x, y, t=t: over_rows(fn, t, x, y))(x, y) for t in (0, 16))
    jax.tree.map(np.testing.assert_array_equal, whole, tiled)


def test_tiles_make_rows_stable_where_kernels_are_not():
    """f32 dots depend on the number of rows; in tiles of one size they cannot."""
    w = gaussian(1, 48, 96)
    x = gaussian(2, ROWS, 96)
    run = programs.jit(
        lambda x, w: over_rows(lambda x: dot(x, w), 32, x), programs.options("tiles")
    )
    many = run(x, w)
    for rows in (1, 7, 33):
        np.testing.assert_array_equal(run(x[:rows], w), many[:rows])
