"""Dynamic sampling: which groups are kept, and when it gives up."""

import numpy as np
import pytest

from orbit_jax.rl.dynamic import Round, fill, groups_that_differ, step_of_round
from orbit_jax.rl.rollouts import Rollouts

NAN = np.nan


def drawn(number: int, rewards: list) -> Round:
    """Groups of two rows; the first token of a row is its number of round and row, as 100 r + i."""
    rows = len(rewards)
    tokens = np.zeros((rows, 4), np.int32)
    tokens[:, 0] = 100 * number + np.arange(rows)
    rollouts = Rollouts(
        tokens=tokens,
        lengths=tokens[:, 0] + 1,
        prompt_lengths=tokens[:, 0] + 2,
        sampled=tokens > 0,
        logprobs=-tokens.astype(np.float32),
        status=tokens[:, 0] + 3,
        groups=np.arange(rows, dtype=np.int32) // 2,
        temperature=0.7,
        filtered=False,
        fingerprint=5,
        calls=2,
        decode_steps=10,
    )
    verdicts = [{"reward": r, "is": t} for r, t in zip(rewards, tokens[:, 0], strict=True)]
    counts = {"turns/mean": 1.0 + number} | ({"tools/ok": 6} if number == 1 else {})
    return Round(rollouts, np.float32(rewards), verdicts, counts)


def run(rounds: list[list], most_rounds: int, saved: list | None = None) -> tuple[Round, list]:
    asked = []

    def draw(number: int) -> Round:
        asked.append(number)
        return drawn(number, rounds[number])

    return fill(draw, most_rounds, lambda: saved.append(True)), asked


def rows_of(found: Round) -> list[int]:
    return found.rollouts.tokens[:, 0].tolist()


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        ([1, 1], False),
        ([0, 1], True),
        ([NAN, 1], False),
        ([NAN, NAN], False),
        ([np.inf, 1], False),  # not finite: it is masked, as one that is not known
        ([0.1, 0.1], False),
    ],
)
def test_a_group_differs_when_two_known_rewards_do(rewards, differs):
    assert groups_that_differ(drawn(0, rewards)).tolist() == [differs]


def test_without_dynamic_sampling_the_first_round_is_taken_as_it_is():
    found, asked = run([[1, 1, 0, 1]], 0)
    assert asked == [0]
    assert rows_of(found) == [0, 1, 2, 3]
    assert found.counts == {"turns/mean": 1.0}


def test_flat_groups_are_replaced_by_differing_ones_of_further_rounds():
    rounds = [[1, 1, 0, 1, NAN, 0], [1, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 1], [0, 1] * 3]
    found, asked = run(rounds, 5)
    assert asked == [0, 1, 2]  # then there are three
    assert rows_of(found) == [2, 3, 100, 101, 200, 201]
    np.testing.assert_array_equal(found.rewards, [0, 1, 1, 0, 0, 1])
    assert [one["is"] for one in found.verdicts] == rows_of(found)
    assert found.rollouts.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.counts == {
        "turns/mean": 2.0,
        "tools/ok": 2.0,  # none in two of three rounds
        "dynamic_sampling/rounds": 3,
        "dynamic_sampling/groups": 9,
        "dynamic_sampling/flat_groups": 0,
    }


def test_rows_keep_all_that_was_recorded_of_them():
    found, _ = run([[1, 1, 0, 1], [1, 0, 0, 0]], 2)
    one, first = found.rollouts, np.array([2, 3, 100, 101])
    assert rows_of(found) == first.tolist()
    np.testing.assert_array_equal(one.lengths, first + 1)
    np.testing.assert_array_equal(one.prompt_lengths, first + 2)
    np.testing.assert_array_equal(one.status, first + 3)
    np.testing.assert_array_equal(one.logprobs, -one.tokens)
    np.testing.assert_array_equal(one.sampled, one.tokens > 0)
    assert (one.calls, one.decode_steps) == (4, 20)
    assert (one.temperature, one.fingerprint, one.groups.dtype) == (0.7, 5, np.int32)


def test_where_rounds_are_used_up_flat_groups_fill_the_step_and_are_counted():
    found, asked = run([[1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1]], 2)
    assert asked == [0, 1]
    assert rows_of(found) == [4, 5, 0, 1, 2, 3]
    assert found.counts["dynamic_sampling/flat_groups"] == 2


def test_it_stops_where_no_group_differs_and_saves_before():
    saved = []
    with pytest.raises(ValueError, match=r"dynamic_sampling=2: in 4 groups of 2 rounds .* resume"):
        run([[1, 1, NAN, 0], [0, 0, 1, 1]], 2, saved)
    assert saved == [True]


def test_rounds_of_different_steps_take_different_examples():
    taken = {step_of_round(step, number) for step in range(100) for number in range(10)}
    assert len(taken) == 1000
    assert [step_of_round(step, 0) for step in range(3)] == [0, 1, 2]  # as without
