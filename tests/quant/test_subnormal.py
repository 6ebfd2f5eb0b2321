"""Products that hardware may flush, against numpy's."""

import jax
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.quant.subnormal import product

CODES = {
    "whole numbers": np.arange(-255, 256).astype(np.float32),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -3], np.float32),
    "e4m3": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": np.arange(124, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
}
# Bits below which scales are drawn: subnormal, small, of any size with infinities and NaNs.
BELOW = {"subnormal": 0x00800000, "small": 0x10000000, "any": 0x7FFFFFFF}


@pytest.mark.parametrize("below", BELOW.values(), ids=BELOW)
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
def test_products_are_rounded_once_whatever_the_hardware_flushes(codes, below):
    rng = np.random.default_rng(0)
    codes = rng.choice(codes, 20_000)
    bits = rng.integers(0, below, codes.shape, np.uint32)
    scales = (bits | rng.integers(0, 2, codes.shape, np.uint32) << 31).view(np.float32)
    with np.errstate(all="ignore"):
        expected = codes * scales
    got = np.asarray(jax.jit(product)(codes, scales))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    got, expected = (x.view(np.uint32)[numbers] for x in (got, expected))
    np.testing.assert_array_equal(got, expected)
