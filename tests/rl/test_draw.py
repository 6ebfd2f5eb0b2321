"""Drawing a token from weights: a block of the vocabulary first, then a place in it."""

import jax
import numpy as np
import pytest

from orbit_jax.rl.draw import _BLOCK, _highest, _pick

WORDS = 3 * _BLOCK - 100  # the last block is not full
pick = jax.jit(_pick)
HIGHEST = np.float32(1 - 2**-23)  # the largest number that jax.random.uniform gives


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Some words have no weight: the first, the last, a whole block."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=WORDS).astype(np.float32) ** 3
    weights[rng.random(WORDS) < 0.3] = 0
    weights[0] = weights[-1] = 0
    weights[_BLOCK : 2 * _BLOCK] = 0
    return weights


def draw(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    return np.asarray(pick(np.broadcast_to(weights, (len(uniform), WORDS)), uniform))


def test_words_come_as_often_as_their_weights_say(weights):
    n = 20_000
    uniform = np.random.default_rng(1).random((n, 2), np.float32)
    counts = np.bincount(draw(weights, uniform), minlength=WORDS)
    expected = n * weights / weights.sum()
    assert not counts[weights == 0].any()
    often = expected > 5
    chi_squared = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[often].sum()
    assert abs(chi_squared / often.sum() - 1) < 0.5  # its mean is 1 for the right distribution


@pytest.mark.parametrize("first", [0.0, HIGHEST])
@pytest.mark.parametrize("second", [0.0, HIGHEST])
def test_a_word_without_weight_is_not_drawn_at_the_ends(weights, first, second):
    (word,) = draw(weights, np.array([[first, second]], np.float32))
    assert weights[word] > 0
    block = np.flatnonzero(weights.reshape(-1)[: 2 * _BLOCK] if first == 0 else weights)
    if first == 0:
        assert word == (block[0] if second == 0 else block[block < _BLOCK][-1])
    else:
        assert word == (block[block >= 2 * _BLOCK][0] if second == 0 else block[-1])


@pytest.mark.parametrize("shift", [0.0, -100.0])  # -100: below what fills up the last block
def test_the_highest_is_the_first_of_the_highest_in_all_blocks(shift):
    rng = np.random.default_rng(2)
    scores = rng.integers(-40, 40, (200, WORDS)).astype(np.float32) + shift
    scores[:50, -1] = shift + 50  # alone, in the last block
    scores[50:100, rng.random(WORDS) < 0.5] = -np.inf
    np.testing.assert_array_equal(jax.jit(_highest)(scores), scores.argmax(axis=1))
