"""Slots of many positions: what lies unused behind the longest row is neither read nor felt."""

import jax
import numpy as np
import pytest
from lab import Lab, prompts

from orbit_jax.rl import rollouts, sampler
from orbit_jax.rl.batch import Bucket, make_batch
from orbit_jax.rl.rollouts import Rollouts

SLOTS = 320  # windows of 128, 256 and 320


@pytest.fixture(scope="module")
def adapter(toy: Lab):
    return toy.adapter()


def generate(
    toy: Lab, adapter, asked: list, num_slots: int = SLOTS, poisoned: int = SLOTS, **given
) -> Rollouts:
    """Rollouts of one sample each; the cache holds NaN from slot `poisoned` on."""
    state = sampler.empty_state(toy.model, 8, num_slots, 4)
    cache = jax.tree.map(lambda c: c.at[:, :, poisoned:].set(np.nan), state.cache)
    state = state.replace(cache=cache)
    settings = {"max_completion_tokens": 8, "group_size": 1, "prompt_ids": None} | given
    out, _ = rollouts.generate(
        toy.sample,
        toy.model,
        toy.base,
        adapter,
        state,
        asked,
        stop_ids=(),
        temperature=1.0,
        seed=0,
        step=0,
        **settings,
    )
    return out


@pytest.fixture(scope="module")
def lengths(toy: Lab, adapter) -> tuple[list, list, Rollouts]:
    """Rows whose ends lie in all windows, with limits of their own, in one batch."""
    asked = prompts(8, 1, 40)
    limits = [4, 20, 300, 90, 8, 150, 250, 60]
    limits = [min(limit, SLOTS - len(p)) for limit, p in zip(limits, asked, strict=True)]
    return asked, limits, generate(toy, adapter, asked, max_completion_tokens=limits)


def test_each_row_ends_at_its_own_limit(lengths):
    _, limits, out = lengths
    assert out.completion_lengths.tolist() == limits


@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_row_is_the_same_alone_as_beside_longer_ones(toy, adapter, lengths, row):
    asked, limits, out = lengths
    alone = generate(
        toy, adapter, [asked[row]], max_completion_tokens=limits[row], prompt_ids=[row]
    )
    assert alone.completion(0) == out.completion(row)
    np.testing.assert_array_equal(alone.logprobs[0], out.logprobs[row])


def test_slots_behind_the_end_change_nothing(toy, adapter, lengths):
    asked, _, out = lengths
    short = generate(toy, adapter, asked, 64, max_completion_tokens=4)
    np.testing.assert_array_equal(short.logprobs[0], out.logprobs[0, :64])


def test_slots_behind_the_longest_row_are_not_read(toy, adapter):
    asked = prompts(8, 1, 40)
    clean, poisoned = (
        generate(toy, adapter, asked, poisoned=end, max_completion_tokens=64)
        for end in (SLOTS, 128)
    )
    np.testing.assert_array_equal(poisoned.logprobs, clean.logprobs)


def test_the_trainer_agrees_exactly_on_rows_of_all_windows(toy, adapter, lengths):
    _, _, out = lengths
    size = -(-int(out.lengths.sum()) // 16) * 16
    batch = make_batch(toy.model, out, np.zeros(8), 1, (Bucket(size, size),))
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    logprobs, _, _ = toy.forward(
        toy.config(), toy.base, adapter, stream, batch.scored[0], batch.temperature
    )
    drawn = batch.sampled[0]
    assert drawn.sum() == out.completion_lengths.sum()
    np.testing.assert_array_equal(np.asarray(logprobs)[drawn], batch.logprobs[0][drawn])


def test_prompts_of_200_lengths_are_traced_once_a_bucket(toy, adapter):
    before = toy.sample.traces
    asked = [[1 + (i + j) % 60 for j in range(n)] for i, n in enumerate(range(1, 201))]
    out = generate(toy, adapter, asked, max_completion_tokens=2)
    assert out.prompt_lengths.tolist() == list(range(1, 201))
    assert (out.completion_lengths == 2).all()
    assert toy.sample.traces - before <= 3
