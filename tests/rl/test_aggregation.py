"""How the losses of tokens make one number."""

import functools

import jax
import numpy as np
import pytest

from orbit_jax.rl.aggregation import token_weights

weights = jax.jit(token_weights, static_argnames=("how", "num_rows", "max_completion_tokens"))
# Rows of 2, 4 and 1 trained tokens, of at most 8; one without any; the last two are padding.
ROWS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4, 4]
TRAINED = [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
LOSSES = np.float32([9, 1, 2, 4, 4, 4, 8, 6, 9, 9, 9, 9])
MEANS = {
    "token_mean": 29 / 7,
    "sequence_mean": (1.5 + 5 + 6) / 3,
    "constant_length": 29 / (3 * 8),
}


def mean(how: str, rows: list, trained: list, num_rows: int = 4) -> float:
    found = weights(how, np.bool_(trained), np.int32(rows), num_rows, max_completion_tokens=8)
    return float((np.asarray(found) * LOSSES.reshape(np.shape(rows))).sum())


@pytest.mark.parametrize("how", MEANS)
def test_the_mean_is_the_papers(how):
    assert mean(how, [ROWS], [TRAINED]) == pytest.approx(MEANS[how], rel=1e-6)


@pytest.mark.parametrize("how", MEANS)
def test_no_split_into_micro_batches_shows(how):
    """Two micro-batches of two rows, unevenly filled: rows count from 0 in each."""
    rows = [[0, 0, 0, 2, 2, 2], [1, 1, 2, 2, 2, 2]]
    order = [0, 1, 2, 10, 11, 9, 7, 8]  # of row 0, padding; of row 2, padding
    trained = [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    losses = np.float32([LOSSES[order[:6]], [6, 9, 9, 9, 9, 9]])
    others = functools.partial(weights, how, num_rows=2, max_completion_tokens=8)
    halves = np.asarray(others(trained=np.bool_(trained), rows=np.int32(rows)))
    together = np.asarray(
        others(
            trained=np.bool_(trained).reshape(1, -1),
            rows=np.int32([[0] * 3 + [2] * 3 + [1] * 2 + [2] * 4]),
        )
    )
    np.testing.assert_array_equal(halves.reshape(-1), together[0])
    wanted = {"token_mean": 9 / 3, "sequence_mean": (1.5 + 6) / 2, "constant_length": 9 / 16}[how]
    assert (halves * losses).sum() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("how", MEANS)
def test_nothing_to_train_on_weighs_nothing(how):
    found = weights(how, np.zeros((1, 12), bool), np.int32([ROWS]), 4, max_completion_tokens=8)
    assert not np.asarray(found).any()
