"""The race: a run ends at the goal or at its limit, and says when it got there."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import race  # noqa: E402

# A side whose reward rises by a tenth a step, from `first`.
FAKE = f"""
import sys
sys.path.insert(0, {str(race.RIVALS)!r})
from worker import Channel

channel = Channel()
requests = iter(channel)
reward = next(requests)["first"]
channel.send({{"recipe": "fake"}})
while not next(requests)["stop"]:
    channel.send({{"reward": reward}})
    reward = min(reward + 0.1, 1.0)
channel.send({{"greedy": reward}})
"""


@pytest.fixture
def run(monkeypatch):
    """A run of the fake side, which starts at that reward."""

    def from_reward(first: float, limit_seconds: float = 60.0) -> dict:
        monkeypatch.setattr(race, "settings_of", lambda seed: {"seed": seed, "first": first})
        return race.run([sys.executable, "-c", FAKE], seed=3, limit_seconds=limit_seconds)

    return from_reward


def test_it_ends_with_the_first_window_whose_mean_is_the_goal(run):
    result = run(0.5)
    # 4 steps of 32 rollouts: 0.7, 0.8, 0.9, 1.0 is the first such mean above 0.8.
    assert result["steps"] == 6
    assert result["rewards"] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert result["seconds_to_goal"] == result["seconds"][-1] == max(result["seconds"])
    assert (result["seed"], result["recipe"], result["greedy"]) == (3, "fake", 1.0)


def test_one_high_reward_is_not_a_window(run):
    assert run(1.0)["steps"] == 4


def test_a_run_that_does_not_get_there_says_so(run):
    result = run(-100.0, limit_seconds=0.0)
    assert result["seconds_to_goal"] is None
    assert result["steps"] == 1


def test_a_side_that_dies_is_named(run, monkeypatch):
    monkeypatch.setattr(race, "settings_of", lambda seed: {})
    with pytest.raises(RuntimeError, match="ended early"):
        race.run([sys.executable, "-c", FAKE], seed=0, limit_seconds=1.0)


def test_a_line_a_run_is_drawn(run, tmp_path):
    race.draw({"ours": [run(0.5)], "rival": [run(0.2), run(0.3)]}, tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 1000
