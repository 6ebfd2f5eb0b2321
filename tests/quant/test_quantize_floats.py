"""Weights of 4-bit and 8-bit floats made from wider ones."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.quant import quantize_floats as module
from orbit_jax.quant.qtensor import QTensor, dequantize, has_subnormal_products

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
W = np.random.default_rng(0).standard_normal((8, 96), np.float32)
widen = jax.jit(dequantize, static_argnums=1)


def nvfp4(w: np.ndarray) -> QTensor:
    overall = module.nvfp4_overall(float(np.abs(w).max()))
    return jax.jit(module.quantize_nvfp4)(w, overall, module.nvfp4_levels(overall))


MAKE = {
    "e4m3": jax.jit(module.quantize_e4m3),
    "mxfp4": jax.jit(module.quantize_mxfp4),
    "nvfp4": nvfp4,
}
every_format = pytest.mark.parametrize("name", MAKE)


def between(numbers: np.ndarray) -> np.ndarray:
    """The numbers, the ties between them and the next float on either side of those; both signs."""
    ties = (numbers[1:] + numbers[:-1]) / 2
    sides = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    x = np.concatenate([numbers, ties, *sides]).astype(np.float32)
    return np.concatenate([x, -x])


@pytest.mark.parametrize(("name", "numbers", "group"), [("mxfp4", E2M1, 32), ("e4m3", E4M3, 0)])
def test_ties_go_to_the_even_code_and_everything_else_to_the_nearest(name, numbers, group):
    x = between(numbers)
    rest = group or len(x) + 1
    x = np.pad(x, (0, -len(x) % (rest - 1)))
    # The largest number in each group makes its scale 1.
    x = np.insert(x.reshape(-1, rest - 1), 0, numbers[-1], axis=1).reshape(1, -1)
    q = MAKE[name](x)
    dtype = ml_dtypes.float4_e2m1fn if name == "mxfp4" else ml_dtypes.float8_e4m3fn
    values = np.asarray(widen(q, jnp.float32))
    expected = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


@every_format
def test_codes_are_the_nearest_that_the_stored_scale_allows(name):
    q = MAKE[name](W)
    scales = np.asarray(widen(q.replace(codes=one(q)), jnp.float32))
    numbers = E4M3 if name == "e4m3" else E2M1
    both = np.concatenate([-numbers, numbers])
    best = np.abs(W[..., None] - scales[..., None] * both).min(axis=-1)
    np.testing.assert_allclose(np.abs(W - widen(q, jnp.float32)), best, rtol=1e-5, atol=1e-7)


def one(q: QTensor) -> jax.Array:
    """Codes that are all 1.0, so that a weight is its scale."""
    return jnp.full_like(q.codes, 0x38 if q.format == "e4m3" else 0x22)


@every_format
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e38])
def test_the_largest_weight_is_kept_and_nothing_overflows(name, size):
    w = W / np.abs(W).max() * np.float32(size)
    q = MAKE[name](w)
    values = np.asarray(widen(q, jnp.float32))
    assert np.isfinite(values).all()
    at = np.unravel_index(np.abs(w).argmax(), w.shape)
    assert values[at] == pytest.approx(w[at], rel=0.2)
    assert not has_subnormal_products(jax.tree.map(np.asarray, q)) or size < 1e-20


@every_format
def test_groups_of_zeros_stay_zeros_and_have_ordinary_scales(name):
    w = W.copy()
    w[..., :32] = 0
    w[0] = 0
    q = MAKE[name](w)
    values = np.asarray(widen(q, jnp.float32))
    assert (values[..., :32] == 0).all()
    assert (values[0] == 0).all()
    assert not has_subnormal_products(jax.tree.map(np.asarray, q))
    nothing = MAKE[name](np.zeros_like(W))
    assert (np.asarray(widen(nothing, jnp.float32)) == 0).all()


def test_a_power_of_two_is_the_next_one_where_the_largest_weight_would_be_cut():
    w = np.zeros((1, 32 * 5), np.float32)
    w[0, ::32] = [4, 6, 6.99, 7, 7.99]
    q = MAKE["mxfp4"](w)
    np.testing.assert_array_equal(np.asarray(q.scales)[0].astype(int) - 127, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(np.asarray(widen(q, jnp.float32))[0, ::32], [4, 6, 6, 8, 8])


def test_the_scale_of_the_largest_group_is_the_largest_that_nvfp4_has():
    q = nvfp4(W)
    assert np.asarray(q.scales).view(ml_dtypes.float8_e4m3fn).max() == 448
    at = np.unravel_index(np.abs(W).argmax(), W.shape)
    assert np.asarray(widen(q, jnp.float32))[at] == pytest.approx(W[at], rel=1e-6)


def test_groups_far_below_the_largest_weight_do_not_vanish():
    """Their scale would round to zero, and codes to infinities."""
    w = np.full((1, 32), 1e-6, np.float32)
    w[0, 0] = 1
    values = np.asarray(widen(nvfp4(w), jnp.float32))[0, 16:]
    np.testing.assert_allclose(values, 1e-6, rtol=0.2)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_width_that_is_no_multiple_of_the_group_is_refused(name):
    with pytest.raises(ValueError, match=r"input width 40 is not a multiple of the format's"):
        MAKE[name](np.ones((2, 40), np.float32))
