"""Transcripts become verdicts: within a time, whatever a grader does."""

import functools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from orbit_jax.tasks.judging import grade_all, judge, measures, pass_rates
from orbit_jax.tasks.rewards import Rewards
from orbit_jax.tasks.sums import Sums
from orbit_jax.tasks.task import Example, Score, Turn


def give(value):
    return Score(value, "scored")


def fail(kind):
    raise kind("broken")


def test_scores_come_in_order_and_failures_are_infra_failures():
    calls = [functools.partial(give, float(i)) for i in range(20)]
    calls[3] = functools.partial(fail, KeyError)
    calls[5] = lambda: 1.0
    calls[7] = functools.partial(fail, SystemExit)
    scores = grade_all(calls, workers=4, max_seconds=30)
    assert [s.value for i, s in enumerate(scores) if i not in (3, 5, 7)] == [
        float(i) for i in range(20) if i not in (3, 5, 7)
    ]
    assert (scores[3].outcome, scores[3].details["error"]) == (
        "infra_failure",
        "KeyError: 'broken'",
    )
    assert scores[5].details["error"] == "TypeError: grade gave float, not a Score"
    assert math.isnan(scores[5].value)
    assert scores[7].details["error"] == "SystemExit: broken"


def test_a_grader_that_never_returns_holds_nobody_up():
    calls = [functools.partial(give, 1.0)] * 12
    for i in (0, 1, 7):
        calls[i] = functools.partial(time.sleep, 600)
    began = time.monotonic()
    scores = grade_all(calls, workers=2, max_seconds=0.5)
    assert time.monotonic() - began < 60
    assert [i for i, s in enumerate(scores) if s.outcome == "infra_failure"] == [0, 1, 7]
    assert scores[0].details["error"] == "not graded within 0.5 seconds"


def test_nothing_to_grade_is_no_scores():
    assert grade_all([], workers=2, max_seconds=1) == []


def test_a_verdict_has_the_turns_and_a_failed_user_is_no_fault_of_the_model():
    turns = {0: [Turn("assistant", "4")], 1: [Turn("assistant", "5"), Turn("user", "higher")]}
    rows = [SimpleNamespace(example=Example("a", "2+2", "4", "sums"))] * 2
    dialogues = SimpleNamespace(rows=rows, failed={1: "late"}, transcript=lambda row, _: turns[row])
    rollouts = SimpleNamespace(
        tokens=np.zeros((2, 8), np.int32),
        lengths=np.array([5, 6]),
        sampled=np.ones((2, 8), bool),
        stops=["eos", "eos"],
    )
    right, failed = judge({"sums": Sums()}, Rewards(), dialogues, rollouts, 1, 60)
    assert (right["reward"], right["outcome"]) == (1.0, "scored")
    assert right["turns"] == [["assistant", "4"]]
    assert (failed["outcome"], failed["details"]["error"]) == (
        "infra_failure",
        "the user failed: late",
    )
    assert failed["turns"] == [["assistant", "5"], ["user", "higher"]]


def verdict(task, value, outcome="scored", **parts):
    reward, parts = value + sum(parts.values()), {"correctness": value, **parts}
    details = {"calls": 3, "error": "none"}
    return {"task": task, "reward": reward, "outcome": outcome, "parts": parts, "details": details}


def test_of_several_tasks_each_has_metrics():
    failed = verdict("code", math.nan, "infra_failure")
    verdicts = [
        verdict("sums", 1.0, format=0.5),
        verdict("sums", 0.0),
        verdict("code", 1.0),
        failed,
    ]
    assert measures(verdicts) == {
        "reward/correctness": pytest.approx(2 / 3),
        "reward/format": 0.5,
        "details/calls": 3,
        "task_sums/reward": 0.75,
        "task_sums/scored": 2,
        "task_code/reward": 1.0,
        "task_code/scored": 1,
        "task_code/infra_failure": 1,
    }
    alone = {"reward/correctness": 1.0, "reward/format": 0.5, "details/calls": 3}
    assert measures(verdicts[:1]) == alone


def test_pass_rates_count_right_answers_and_leave_failures_out():
    verdicts = [verdict("sums", 1.0), verdict("sums", 0.9), verdict("code", 1.0)]
    verdicts.append(verdict("code", math.nan, "infra_failure"))
    assert pass_rates(verdicts, "heldout", "greedy") == {
        "heldout/pass_greedy": pytest.approx(2 / 3),
        "heldout_sums/pass_greedy": 0.5,
        "heldout_code/pass_greedy": 1.0,
    }
    assert pass_rates(verdicts[:2], "heldout", "sampled") == {"heldout/pass_sampled": 0.5}
    with pytest.raises(RuntimeError, match="task code: none of 1 rollouts of heldout"):
        pass_rates(verdicts[2:][1:], "heldout", "greedy")
