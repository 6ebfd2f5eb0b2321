"""Making low-bit weights with AQT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_quantizer

from orbit_jax.quant import quantize as module
from orbit_jax.quant.qtensor import dequantize

quantize = jax.jit(module.quantize, static_argnums=(1, 2))
widen = jax.jit(dequantize, static_argnums=1)
W = np.random.default_rng(0).standard_normal((2, 3, 5, 48), np.float32)


def scales_of(q) -> np.ndarray:
    return np.asarray(q.scales).view(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 48), (8, 12)])
def test_error_is_at_most_half_a_step_and_the_rounding_of_the_scale(bits, group):
    q = quantize(W, bits, group)
    assert q.shape == W.shape
    assert q.scales.shape == (2, 3, 5, 48 // group)
    step = np.repeat(scales_of(q), group, axis=-1)
    error = np.abs(np.asarray(widen(q, jnp.float32)) - W)
    # The largest code is 2^(bits-1) - 1/2; a bf16 scale is off by at most 2^-9 of itself.
    assert (error <= step * (0.5 + 2 ** (bits - 1) * 2**-8)).all()
    # And the step is no coarser than the group's largest value asks for.
    largest = np.abs(W).reshape(2, 3, 5, -1, group).max(axis=-1)
    np.testing.assert_allclose(scales_of(q), largest / (2 ** (bits - 1) - 0.5), rtol=2**-8)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 24)])
def test_values_are_the_ones_that_aqt_reads_back(bits, group):
    grouped = W.reshape(2, 3, 5, -1, group)

    @jax.jit
    def aqt(w: jax.Array) -> jax.Array:
        quantizer = aqt_quantizer.quantizer_make(bits, scale_dtype=jnp.bfloat16)
        quantized, _ = quantizer.quant(w, calibration_axes=[4])
        return quantized.qvalue.astype(jnp.float32) * quantized.scale[0].astype(jnp.float32)

    theirs = aqt(grouped)
    ours = widen(quantize(W, bits, group), jnp.float32)
    np.testing.assert_array_equal(ours, theirs.reshape(W.shape))


def test_a_group_is_quantised_alone_and_zeros_stay_zero():
    changed = W.copy()
    changed[..., 16:32] = 0
    before, after = (widen(quantize(w, 4, 16), jnp.float32) for w in (W, changed))
    assert (after[..., 16:32] == 0).all()
    np.testing.assert_array_equal(before[..., :16], after[..., :16])
    np.testing.assert_array_equal(before[..., 32:], after[..., 32:])


@pytest.mark.parametrize("group", [0, -16, 32, 96])
def test_a_group_size_that_does_not_divide_is_refused(group):
    with pytest.raises(
        ValueError, match=rf"^group_size={group} does not divide the input width 48: choose a"
    ):
        quantize(W, 4, group)


def test_codes_of_four_bits_need_an_even_input_width():
    with pytest.raises(
        ValueError, match=r"^input width 5 is odd: 4-bit codes lie in pairs; use bits=8"
    ):
        quantize(jnp.ones((4, 5)), 4, 5)
    assert quantize(jnp.ones((4, 5)), 8, 5).shape == (4, 5)


def test_other_bit_widths_are_refused():
    with pytest.raises(ValueError, match="bits=3"):
        quantize(W, 3, 16)
