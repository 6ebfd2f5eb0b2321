"""Importance weights of tokens that another policy sampled."""

import jax
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.rl.correction import importance_weights

weights = jax.jit(importance_weights, static_argnames=("config", "num_rows"))
ROWS = np.int32([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2]])  # 2 is padding
RATIOS = np.float32([[1.5, 2, 0.8, 0.25, 1.2, 1], [3.0, 1.25, 1, 0.8, 1, 1]])


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        ("token_tis", [[1.5, 2, 0.8, 0.25, 1.2, 1], [2, 1.25, 1, 0.8, 1, 1]]),
        ("token_mask", [[1.5, 2, 0.8, 0, 1.2, 1], [0, 1.25, 1, 0.8, 1, 1]]),
        ("sequence_tis", [[2, 2, 2, 0.3, 0.3, 1], [2, 1, 1, 1, 1, 1]]),  # products 2.4, 0.3; 3, 1
        ("sequence_mask", [[0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1]]),
    ],
)
def test_weights_are_cut_or_dropped_beyond_the_limit(correction, wanted):
    config = PPOConfig(correction=correction, max_importance_weight=2.0 + 1e-6)
    sampled = np.full(ROWS.shape, -1, np.float32)
    found = weights(config, sampled + np.log(RATIOS), sampled, ROWS, 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("correction", ["token_tis", "token_mask", "sequence_tis"])
def test_any_difference_gives_a_finite_weight(correction):
    config = PPOConfig(correction=correction)
    sampled = np.float32(np.where(RATIOS > 1, -1000, 0))
    assert np.isfinite(weights(config, np.zeros_like(RATIOS), sampled, ROWS, 2)).all()
