import math

import pytest

from orbit_jax.tasks.grading import INFRA_FAILURE, PARSE_FAILURE, RIGHT, WRONG
from orbit_jax.tasks.rewards import (
    Part,
    Rewards,
    Sampled,
    matches,
    means,
    outcome_of,
    overlong,
)
from orbit_jax.tasks.task import Score

TEXT = "<think>one\nand one</think> \\boxed{2}\n"


def test_correctness_alone_is_the_graders_value():
    score = Rewards().score(RIGHT, Sampled(TEXT, 9, "eos"))
    assert score == Score(1.0, "scored", {"correctness": 1.0})


def test_the_value_is_the_weighted_sum_of_parts_that_are_logged_without_weight():
    rewards = Rewards(2.0, (matches(r"<think>.*</think>.*", 0.5), overlong(10, 20, 0.1)))
    score = rewards.score(WRONG, Sampled(TEXT, 15, "eos"))
    assert score.details == {"correctness": 0.0, "format": 1.0, "length": -0.5}
    assert score.value == pytest.approx(2.0 * 0 + 0.5 * 1 - 0.1 * 0.5)
    assert score.outcome == "scored"


def test_partial_credit_and_the_graders_details_stay():
    graded = Score(0.25, "scored", {"tests": 4.0, "error": "AssertionError"})
    score = Rewards(1.0, (overlong(0, 8, 1.0),)).score(graded, Sampled("", 2, "eos"))
    assert score.value == 0.0
    assert score.details == graded.details | {"correctness": 0.25, "length": -0.25}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (TEXT, 1),
        ("  " + TEXT, 1),
        ("well, " + TEXT, 0),
        ("<think>one", 0),
        ("", 0),
    ],
)
def test_format_is_that_of_the_whole_text(text, value):
    assert matches(r"<think>.*</think>", 1.0).measure(Sampled(text, 1, "eos")) == 0
    assert matches(r"<think>.*</think>.*", 1.0).measure(Sampled(text, 1, "eos")) == value


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0), (10, 0), (11, -0.25), (12, -0.5), (14, -1), (15, -1)]
)
def test_length_costs_nothing_up_to_the_soft_limit_then_linearly(tokens, value):
    assert overlong(10, 14, 1.0).measure(Sampled("", tokens, "eos")) == value


@pytest.mark.parametrize(
    ("outcome", "stop", "expected"),
    [
        ("parse_failure", "length", "truncated"),
        ("parse_failure", "eos", "parse_failure"),
        ("scored", "length", "scored"),
        ("infra_failure", "length", "infra_failure"),
    ],
)
def test_what_ends_by_length_before_its_answer_is_truncated(outcome, stop, expected):
    assert outcome_of(outcome, stop) == expected


def test_a_truncated_rollout_keeps_the_other_parts():
    rewards = Rewards(1.0, (overlong(4, 8, 0.5),))
    score = rewards.score(PARSE_FAILURE, Sampled("1+1=", 8, "length"))
    assert (score.value, score.outcome) == (-0.5, "truncated")


def broken(_):
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("graded", "part", "error"),
    [
        (INFRA_FAILURE, overlong(4, 8, 1.0), None),
        (RIGHT, Part("own", 1.0, broken), "own: OSError: no disk"),
        (RIGHT, Part("own", 0.0, lambda _: math.nan), None),
        (RIGHT, Part("own", 1.0, lambda _: -math.inf), None),
    ],
)
def test_what_cannot_be_measured_makes_the_whole_reward_nan(graded, part, error):
    score = Rewards(1.0, (part,)).score(graded, Sampled(TEXT, 9, "length"))
    assert math.isnan(score.value)
    assert score.outcome == "infra_failure"
    assert score.details.get("error") == error
    assert set(score.details) >= {"correctness", part.name}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rewards(math.nan), "weight of 'correctness' is nan"),
        (lambda: Rewards(1.0, (overlong(1, 2, math.inf),)), "weight of 'length' is inf"),
        (lambda: Rewards(1.0, (overlong(1, 2, 1.0),) * 2), "'length' twice"),
        (lambda: Rewards(1.0, (matches("", 1.0, "correctness"),)), "'correctness' twice"),
        (lambda: matches("(", 1.0), r"pattern '\(' is no regular expression"),
        (lambda: overlong(8, 8, 1.0), "soft_limit=8 with limit=8"),
        (lambda: overlong(-1, 8, 1.0), "soft_limit=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_means_of_parts_leave_out_what_is_unknown_and_what_is_text():
    details = [{"correctness": 1.0, "error": "x"}, {"correctness": math.nan}, {"correctness": 0}]
    assert means([*details, {"length": -0.5}], "reward") == {
        "reward/correctness": 0.5,
        "reward/length": -0.5,
    }
