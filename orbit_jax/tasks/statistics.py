"""What samples tell of a model: pass@k, majority@k, intervals, and whether two differ.

P problems, n samples of each. Problems are drawn from those that a model may meet, independently;
samples of one problem are not independent of one another, so every interval here is over problems.
A NaN is a problem, or a sample, of which nothing is known: it is left out.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

MOST_EXACT_SAMPLES = 256  # of majority@k: above, counting subsets takes seconds
DRAWS = 10_000  # of a bootstrap, or of subsets
_MOST_FLIPS = 16
_BLOCK = 1 << 22  # numbers of a bootstrap that are in memory at a time


class Interval(NamedTuple):
    """Bounds of a confidence interval."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Paired:
    """How the second of two models differs from the first on the same problems.

    Attributes:
      problems: that both have a value for.
      difference: mean of second - first; low, high: its interval.
      better, worse: number of problems on which the second has the higher or the lower value.
      p_value: two-sided, of no difference.
      method: `mcnemar` (exact; with the interval of Bonett and Price) or `sign flips` (with an
        interval by a bootstrap over problems, which is too narrow for fewer than about 20).
    """

    problems: int
    difference: float
    low: float
    high: float
    better: int
    worse: int
    p_value: float
    method: str


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k is right, drawn without replacement from n of which c are.

    That is 1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k (Chen et al., 2021).

    Raises:
      ValueError: unless 1 <= k <= samples and 0 <= right <= samples.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(
            f"pass@k with k={k}, samples={samples}, right={right}: needs 1 <= k <= samples and "
            "0 <= right <= samples; draw more samples or lower k"
        )
    if k == 1 or samples - right < k:
        return right / samples if k == 1 else 1.0
    # A product of ratios, by logarithms: binomials overflow, and 1 - product loses small chances.
    return abs(np.expm1(np.log1p(-k / np.arange(samples - right + 1, samples + 1)).sum()).item())


def majority_at_k(
    votes: Sequence[Hashable | None], right: Sequence[float], k: int, seed: int = 0
) -> float:
    """Chance that the most frequent answer of k is right, drawn without replacement from n.

    Of answers that tie for the most votes one is taken at random. A vote of None (no answer) counts
    among the k and votes for nothing; k of them are wrong. Exact up to 256 samples; above, the mean
    over 10,000 subsets drawn by `seed`.

    Args:
      votes: [n] answers; equal ones vote together.
      right: [n] whether a sample is right; an answer is as right as its samples on average.

    Raises:
      ValueError: unless 1 <= k <= n, and there is one vote for each sample.
    """
    n = len(votes)
    if not 1 <= k <= n or len(right) != n:
        raise ValueError(
            f"majority@k with k={k}, {n} votes and {len(right)} values: needs 1 <= k <= votes and "
            "a value for each; draw more samples or lower k"
        )
    counts = Counter(vote for vote in votes if vote is not None)
    sums = dict.fromkeys(counts, 0.0)
    for vote, value in zip(votes, right, strict=True):
        if vote is not None:
            sums[vote] += value
    silent = n - counts.total()
    if n > MOST_EXACT_SAMPLES:
        shares = np.array([sums[a] / counts[a] for a in counts])
        return _drawn_majority(np.array([*counts.values(), silent]), shares, k, seed)
    found = 0.0
    for answer, count in counts.items():
        if sums[answer]:
            others = [c for other, c in counts.items() if other != answer]
            wins = sum(
                math.comb(count, top) * _wins(others, silent, k - top, top)
                for top in range(1, min(count, k) + 1)
            )
            found += wins * sums[answer] / count
    return min(found / math.comb(n, k), max(right))


def wilson(right: float, total: float, confidence: float = 0.95) -> Interval:
    """Wilson's interval of a proportion of independent problems; [0, 1] of none."""
    if total <= 0:
        return Interval(0.0, 1.0)
    z2 = _z(confidence) ** 2
    share = right / total
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * total)) / total) / (1 + z2 / total)
    return Interval(max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def share_interval(shares: Sequence[float], samples: int = 1, confidence: float = 0.95) -> Interval:
    """The interval of the mean of shares [P] between 0 and 1, each from the samples of one problem.

    Wilson's, of as many independent problems as would have the variance that is seen between these:
    of shares that are all 0 or 1 exactly Wilson's, and else within [0, 1] where a normal interval,
    which it approaches, is not. Never of more than P x samples.
    """
    known = _known(shares)
    if not known.size:
        return Interval(0.0, 1.0)
    mean, variance = float(known.mean()), float(known.var())
    spread = mean * (1 - mean)
    most = known.size * samples if spread else known.size
    problems = min(spread * known.size / variance, most) if variance else most
    return wilson(mean * problems, problems, confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The normal interval of the mean of values [P] of any scale, each the mean of one problem."""
    known = _known(values)
    if known.size < 2:
        return Interval(-math.inf, math.inf)
    half = _z(confidence) * float(known.std(ddof=1)) / math.sqrt(known.size)
    return Interval(float(known.mean()) - half, float(known.mean()) + half)


def student_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of a few independent values [n], as one of each seed.

    It holds the mean of normal values as often as it says however few there are; of a single value
    nothing is known, and it is infinite.
    """
    known = _known(values)
    if known.size < 2:
        return Interval(-math.inf, math.inf)
    half = student_quantile(known.size - 1, confidence) * float(known.std(ddof=1))
    half /= math.sqrt(known.size)
    return Interval(float(known.mean()) - half, float(known.mean()) + half)


def student_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that |T| is below with this probability, where T is Student's.

    By bisection of the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3
    and 26.7.4), in the angle whose tangent is t / sqrt(freedom).

    Raises:
      ValueError: unless freedom is at least 1 and 0 < confidence < 1.
    """
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"Student's t with freedom={freedom}, confidence={confidence}: needs at least 1 degree "
            "of freedom and a confidence between 0 and 1"
        )
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _within(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)


def compare(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> Paired:
    """Compares two models by their values [P] of the same problems, in the same order.

    Where all are 0 or 1 by McNemar's exact test, else by flips of signs, which are the same there:
    if there is no difference, a problem's change might as well have gone the other way.

    Raises:
      ValueError: if the lengths differ, or no problem has a value of both.
    """
    if len(first) != len(second):
        raise ValueError(
            f"compare: {len(first)} values against {len(second)}: give those of the same problems"
        )
    # What differs by rounding alone is equal.
    first, second = np.round(np.asarray(first, float), 12), np.round(np.asarray(second, float), 12)
    both = ~(np.isnan(first) | np.isnan(second))
    first, second = first[both], second[both]
    if not first.size:
        raise ValueError("compare: no problem has a value of both; evaluate the same problems")
    change = second - first
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    if np.isin([first, second], (0, 1)).all():
        method, p_value = "mcnemar", mcnemar(better, worse)
        low, high = _bonett_price(better, worse, first.size, confidence)
    else:
        method, p_value = "sign flips", sign_flips(change, seed)
        low, high = _bootstrap(change, confidence, seed)
    difference = float(change.mean())
    return Paired(first.size, difference, low, high, better, worse, p_value, method)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p-value of so many problems that one alone solves, and the other alone.

    Each is either's with chance 1/2 if there is no difference; those of both or none say nothing.
    """
    total = better + worse
    tail = sum(math.comb(total, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**total)


def sign_flips(change: Sequence[float], seed: int = 0) -> float:
    """The two-sided p-value of a mean change [P], were the sign of each left to chance.

    Exact where up to 16 problems have changed, else by 10,000 draws.
    """
    sizes = np.abs([x for x in change if x])
    seen = abs(math.fsum(change)) * (1 - 1e-12)  # sums that are equal but for rounding are equal
    if sizes.size <= _MOST_FLIPS:
        flips = (np.arange(1 << sizes.size)[:, None] >> np.arange(sizes.size)) & 1
        return float((np.abs((2 * flips - 1) @ sizes) >= seen).mean())
    rng, found, at_once = np.random.default_rng(seed), 0, max(1, _BLOCK // sizes.size)
    for done in range(0, DRAWS, at_once):
        flips = rng.integers(2, size=(min(at_once, DRAWS - done), sizes.size))
        found += int((np.abs((2 * flips - 1) @ sizes) >= seen).sum())
    return (found + 1) / (DRAWS + 1)


def _wins(others: Sequence[int], silent: int, size: int, top: int) -> float:
    """Ways to draw `size` from the others such that an answer with `top` votes wins.

    A tie with t others is 1 / (t + 1) of a win.
    """
    ties = size // top
    ways = np.zeros((size + 1, ties + 1))  # by samples drawn, and answers that have `top` votes
    ways[0, 0] = 1
    for count in others:
        more = np.zeros_like(ways)
        for drawn in range(min(count, size, top - 1) + 1):
            more[drawn:] += math.comb(count, drawn) * ways[: size + 1 - drawn]
        if min(count, size) >= top:
            more[top:, 1:] += math.comb(count, top) * ways[: size + 1 - top, :-1]
        ways = more
    missing = [math.comb(silent, size - drawn) for drawn in range(size + 1)]
    return float(missing @ ways @ (1 / np.arange(1, ties + 2)))


def _drawn_majority(counts: np.ndarray, shares: np.ndarray, k: int, seed: int) -> float:
    """The same by subsets drawn at random; the last of `counts` votes for nothing."""
    rng = np.random.default_rng(seed)
    drawn = rng.multivariate_hypergeometric(counts, k, DRAWS, method="marginals")[:, :-1]
    most = drawn.max(axis=1, keepdims=True, initial=0)
    winners = (drawn == most) & (most > 0)
    return float((winners @ shares / np.maximum(winners.sum(axis=1), 1)).mean())


def _bonett_price(better: int, worse: int, problems: int, confidence: float) -> Interval:
    """The interval of a difference of paired proportions, as if two more problems had differed."""
    total = problems + 2
    up, down = (better + 1) / total, (worse + 1) / total
    half = _z(confidence) * math.sqrt((up + down - (up - down) ** 2) / total)
    return Interval(max(-1.0, up - down - half), min(1.0, up - down + half))


def _bootstrap(change: np.ndarray, confidence: float, seed: int) -> Interval:
    """Percentiles of the mean of problems drawn again with replacement."""
    rng, size = np.random.default_rng(seed), change.size
    at_once = max(1, _BLOCK // size)
    means = [
        change[rng.integers(size, size=(min(at_once, DRAWS - done), size))].mean(axis=1)
        for done in range(0, DRAWS, at_once)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Interval(float(low), float(high))


def _within(angle: float, freedom: int) -> float:
    """Chance that |T| < sqrt(freedom) tan(angle)."""
    odd, cos2 = freedom % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for i in range(2 + odd, freedom, 2):
        term *= cos2 * (i - 1) / i
        total += term
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def _known(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, float)
    return values[~np.isnan(values)]


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
