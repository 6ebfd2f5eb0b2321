"""Estimates against all subsets, intervals against how often they hold the truth."""

import itertools
import math

import numpy as np
import pytest

from orbit_jax.tasks import statistics
from orbit_jax.tasks.statistics import (
    compare,
    majority_at_k,
    mcnemar,
    mean_interval,
    pass_at_k,
    share_interval,
    sign_flips,
    student_interval,
    student_quantile,
    wilson,
)


def over_subsets(n, k, value):
    """The mean of `value` over all subsets of k of n."""
    return np.mean([value(list(chosen)) for chosen in itertools.combinations(range(n), k)])


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(right, k):
    counted = over_subsets(6, k, lambda chosen: min(chosen) < right)
    assert pass_at_k(6, right, k) == pytest.approx(counted, abs=1e-12)


def test_pass_at_k_is_accurate_where_binomials_overflow_and_chances_are_small():
    assert pass_at_k(100_000, 3, 10) == pytest.approx(1 - (1 - 1e-4) ** 3, rel=1e-4)
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert pass_at_k(10**6, 999_999, 2) == 1.0


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    found = [pass_at_k(8, int(right), 4) for right in rng.binomial(8, 0.2, 4000)]
    assert np.mean(found) == pytest.approx(1 - 0.8**4, abs=0.02)


def majority_of(votes, right, chosen):
    """The share of right ones among the answers that have the most votes."""
    said = [votes[i] for i in chosen if votes[i] is not None]
    if not said:
        return 0.0
    most = max(map(said.count, said))
    winners = {vote for vote in said if said.count(vote) == most}
    share = {v: np.mean([r for w, r in zip(votes, right, strict=True) if w == v]) for v in winners}
    return np.mean(list(share.values()))


@pytest.mark.parametrize(
    ("votes", "right"),
    [
        ("aaabbc..", "a"),
        ("aabbcc.d", "a"),
        ("abcdefgh", "h"),
        ("aaaabbbb", "ab"),
        ("........", ""),
        ("aaaaaaab", "b"),
        ("aabbbbcc", "ac"),
    ],
)
@pytest.mark.parametrize("k", range(1, 9))
def test_majority_is_the_mean_over_all_subsets(votes, right, k):
    values = [float(vote in right) for vote in votes]
    said = [None if vote == "." else vote for vote in votes]
    counted = over_subsets(8, k, lambda chosen: majority_of(said, values, chosen))
    assert majority_at_k(said, values, k) == pytest.approx(counted, abs=1e-12)


def test_an_answer_is_as_right_as_its_samples_on_average():
    assert majority_at_k("aab", [1, 0, 0], 3) == 0.5


def test_majority_of_many_samples_is_drawn_by_a_seed(monkeypatch):
    rng = np.random.default_rng(0)
    votes = rng.choice(list("aabbbcd"), 200).tolist()
    right = [float(vote == "a") for vote in votes]
    exact = majority_at_k(votes, right, 20)
    monkeypatch.setattr(statistics, "MOST_EXACT_SAMPLES", 100)
    drawn = [majority_at_k(votes, right, 20, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == pytest.approx(exact, abs=0.02)
    assert drawn[0] != exact
    assert majority_at_k([None] * 200, [0] * 200, 20) == 0


def test_numbers_that_make_no_sense_are_refused():
    for k, right in ((0, 1), (5, 1), (2, 5)):
        with pytest.raises(ValueError, match=rf"k={k}, samples=4, right={right}.*lower k"):
            pass_at_k(4, right, k)
    with pytest.raises(ValueError, match="k=3, 2 votes"):
        majority_at_k("ab", [0, 1], 3)
    with pytest.raises(ValueError, match="2 values against 1"):
        compare([0, 1], [1])
    with pytest.raises(ValueError, match="no problem has a value of both"):
        compare([0, math.nan], [math.nan, 1])


def test_wilson_gives_published_figures():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    assert wilson(0, 0) == (0, 1)
    assert wilson(81, 263, 0.9) == pytest.approx((0.2635, 0.3565), abs=1e-3)


def test_of_one_sample_a_problem_the_interval_is_wilsons():
    shares = [1.0] * 7 + [0.0] * 3 + [math.nan]
    assert share_interval(shares) == pytest.approx(wilson(7, 10))
    assert share_interval([1.0] * 10, samples=16) == wilson(10, 10)
    assert share_interval([]) == (0, 1)


@pytest.mark.parametrize("samples", [1, 16])
def test_intervals_hold_the_truth_as_often_as_they_say(samples):
    """Problems of very different difficulty: samples taken as independent would not do."""
    rng = np.random.default_rng(0)
    chances = rng.beta(0.4, 0.6, (2000, 60))
    shares = rng.binomial(samples, chances) / samples
    held = [low <= 0.4 <= high for low, high in (share_interval(s, samples) for s in shares)]
    assert 0.93 < np.mean(held) < 0.97
    held = [low <= 0.4 <= high for low, high in map(mean_interval, shares)]
    assert 0.92 < np.mean(held) < 0.97


def test_mean_interval_is_that_of_the_problems_means():
    assert mean_interval([1.0, 2.0, 3.0, math.nan]) == pytest.approx((0.868, 3.132), abs=1e-3)
    assert mean_interval([1.0]) == (-math.inf, math.inf)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 0), (2, 7), (4, 4)])
def test_mcnemar_counts_all_ways_in_which_problems_could_have_gone(better, worse):
    total = better + worse
    ways = [sum(way) for way in itertools.product((0, 1), repeat=total)]
    extreme = max(better, worse)
    counted = np.mean([max(won, total - won) >= extreme for won in ways])
    assert mcnemar(better, worse) == pytest.approx(counted)


def test_right_and_wrong_are_compared_by_mcnemar():
    first = [0] * 6 + [1] * 12 + [0, 1, math.nan]
    second = [1] * 6 + [1] * 12 + [0, 0, 1]
    found = compare(first, second)
    assert (found.problems, found.better, found.worse) == (20, 6, 1)
    assert found.method == "mcnemar"
    assert found.p_value == mcnemar(6, 1) == 0.125
    assert found.difference == pytest.approx(0.25)
    assert -0.1 < found.low < 0 < found.difference < found.high < 0.6


@pytest.mark.parametrize("size", [0, 1, 5, 9])
def test_flips_of_signs_count_all_ways_in_which_changes_could_have_gone(size):
    change = np.random.default_rng(size).integers(-4, 5, size) / 8
    ways = [abs(sum(way)) for way in itertools.product(*((-x, x) for x in change))]
    assert sign_flips(change) == np.mean(np.array(ways) >= abs(change.sum()))


def test_values_that_differ_by_rounding_are_equal():
    first = [pass_at_k(4, 2, 1), 1 - 1e-16, 0.0]
    found = compare(first, [pass_at_k(6, 3, 1) + 1e-15, 1.0, 1e-17])
    assert (found.better, found.worse, found.difference, found.p_value) == (0, 0, 0.0, 1.0)
    assert compare([1 - 1e-16], [1e-17]).method == "mcnemar"


def test_flips_of_signs_are_mcnemars_test_where_all_is_right_or_wrong():
    for better, worse in ((0, 0), (2, 0), (5, 1), (3, 3)):
        change = [1.0] * better + [-1.0] * worse + [0.0] * 4
        assert sign_flips(change) == pytest.approx(mcnemar(better, worse))


def test_many_flips_are_drawn_by_a_seed(monkeypatch):
    change = np.random.default_rng(3).integers(-3, 5, 14) / 8
    exact = sign_flips(change)
    monkeypatch.setattr(statistics, "_MOST_FLIPS", 4)
    drawn = sign_flips(change, seed=1)
    assert drawn == sign_flips(change, seed=1) == pytest.approx(exact, abs=0.02)
    assert drawn != exact


def test_shares_are_compared_problem_by_problem():
    rng = np.random.default_rng(0)
    chances = rng.uniform(size=200)
    first = rng.binomial(8, chances) / 8
    higher = rng.binomial(8, chances**0.5) / 8
    found = compare(first, higher, seed=1)
    assert found.method == "sign flips"
    assert found.low < found.difference < found.high
    assert found.low > 0.1
    assert found.p_value < 0.001
    assert found == compare(first, higher, seed=1)
    back = compare(higher, first, seed=1)
    assert (back.better, back.worse) == (found.worse, found.better)
    assert back.difference == -found.difference
    # Pairs tell more than two intervals do.
    assert found.high - found.low < np.diff(share_interval(first, 8))


def test_a_difference_is_found_where_there_is_none_as_rarely_as_it_says(monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", 1000)
    rng = np.random.default_rng(0)
    found = [compare(*rng.binomial(8, rng.uniform(size=60), (2, 60)) / 8) for _ in range(400)]
    assert {one.method for one in found} == {"sign flips"}
    assert 0.02 < np.mean([one.p_value < 0.05 for one in found]) < 0.08
    assert 0.92 < np.mean([one.low <= 0 <= one.high for one in found]) < 0.98


@pytest.mark.parametrize("second", [0.5, 0.6])
def test_intervals_of_a_difference_hold_it_as_often_as_they_say(second):
    rng = np.random.default_rng(0)
    held = []
    for _ in range(1000):
        level = rng.uniform(size=50)  # common to both, so that the outcomes are paired
        noise = rng.uniform(-0.2, 0.2, (2, 50))
        found = compare(*((level + noise[i] < s) * 1.0 for i, s in enumerate((0.5, second))))
        held.append(found.low <= second - 0.5 <= found.high)
    assert np.mean(held) > 0.93


@pytest.mark.parametrize(
    ("freedom", "confidence", "published"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.30265),
        (3, 0.95, 3.18245),
        (4, 0.95, 2.77645),
        (9, 0.95, 2.26216),
        (30, 0.95, 2.04227),
        (120, 0.95, 1.97993),
        (2, 0.99, 9.92484),
        (5, 0.90, 2.01505),
        (7, 0.5, 0.71114),
        (100_000, 0.95, 1.95999),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom, confidence, published):
    assert student_quantile(freedom, confidence) == pytest.approx(published, abs=6e-6, rel=4e-6)


def test_an_interval_of_three_normal_values_holds_their_mean_as_often_as_it_says():
    drawn = np.random.default_rng(0).normal(2.0, 5.0, (4000, 3))
    held = [low <= 2.0 <= high for low, high in map(student_interval, drawn)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)
    normal = [low <= 2.0 <= high for low, high in map(mean_interval, drawn)]
    assert np.mean(normal) < 0.87  # what the normal interval claims of so few


def test_an_interval_of_one_seed_is_unknown_and_of_equal_ones_a_point():
    assert student_interval([0.4]) == (-math.inf, math.inf)
    assert student_interval([0.4, math.nan]) == (-math.inf, math.inf)
    assert student_interval([0.25, 0.25, 0.25]) == (0.25, 0.25)


@pytest.mark.parametrize(("freedom", "confidence"), [(0, 0.95), (2, 1.0), (2, 0.0)])
def test_a_quantile_that_is_none_is_refused(freedom, confidence):
    with pytest.raises(ValueError, match="needs at least 1 degree"):
        student_quantile(freedom, confidence)
