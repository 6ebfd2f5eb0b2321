"""What a report draws: which metrics, and of each its curve over an arm's seeds, with a band."""

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from orbit_jax.runs.plots import SMOOTHING_STEPS, smooth
from orbit_jax.runs.report.reading import GAP, REWARD, SECONDS, Arm

MOST_POINTS = 150  # of a curve; of more steps, several become one


class Kind(NamedTuple):
    """How a metric is drawn.

    Attributes:
      title: over the picture; empty: the metric's own name.
      smoothed: by a moving average.
      log: on a logarithmic axis, where its values span that much.
      largest: the largest over seeds and steps stands for them, not the mean.
      always: even where it never changes.
    """

    title: str = ""
    smoothed: bool = False
    log: bool = False
    largest: bool = False
    always: bool = False


class Section(NamedTuple):
    """Pictures that belong together; `patterns` are metrics, with `*` for any part of a name."""

    title: str
    patterns: Sequence[str]


SECTIONS = (
    Section(
        "Learning",
        (
            REWARD,
            "heldout/pass_greedy",
            "heldout/pass_sampled",
            "heldout_*/pass_*",
            "task_*/reward",
        ),
    ),
    Section(
        "Sampler and trainer",
        (GAP, "entropy", "kl/*", "clip_fraction", "gradient_norm/policy", "gradient_norm/critic"),
    ),
    Section("Completions", ("completion/length_mean", "stop/length", "turns/mean", "tools/error")),
    Section("Router load", ("router/*",)),
    Section("Adapter update over its size, by group", ("adapter/update_size/*",)),
    Section("Speed", ("tokens_per_second", SECONDS)),
    Section("Machine", ("hardware/*",)),
)
REST = Section("Other metrics", ("*",))
KINDS = {
    REWARD: Kind("Training reward", smoothed=True, always=True),
    "heldout/pass_greedy": Kind("Held-out pass rate, greedy", always=True),
    "heldout/pass_sampled": Kind("Held-out pass rate, temperature 1", always=True),
    GAP: Kind("Log-prob gap, largest", largest=True, always=True),
    "entropy": Kind("Entropy per token"),
    "kl/rollout_k1": Kind("KL to the rollouts' policy, k1"),
    "kl/rollout_k3": Kind("KL to the rollouts' policy, k3"),
    "kl/reference_k1": Kind("KL to the base, k1"),
    "kl/reference_k3": Kind("KL to the base, k3"),
    "clip_fraction": Kind("Share of tokens clipped"),
    "gradient_norm/policy": Kind("Gradient norm, policy", log=True),
    "gradient_norm/critic": Kind("Gradient norm, critic", log=True),
    "completion/length_mean": Kind("Tokens of a completion, mean"),
    "stop/length": Kind("Share of completions cut at the limit"),
    "turns/mean": Kind("Turns of a rollout, mean"),
    "tools/error": Kind("Tool calls that failed"),
    "router/load_max_over_mean": Kind("Load of the busiest expert, over the mean"),
    "router/unused_experts": Kind("Experts without a token"),
    "tokens_per_second": Kind("Tokens per second"),
    SECONDS: Kind("Seconds of a step"),
}
_UPDATES = "adapter/update_size/"
_LOG = (f"{_UPDATES}*", "gradient_norm/*", "adapter/norm/*")
_SAME_AS_ANOTHER = ("step", "adapter/update_size")


class Curve(NamedTuple):
    """A metric over an arm's seeds.

    Attributes:
      steps, middle, low, high: [N] each: the mean over the seeds that have the step (or the
        largest), the lowest and the highest; NaN where none is finite.
      lost: values that were not finite.
      every: steps that one point stands for; low and high are then of all of them.
    """

    steps: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    lost: int
    every: int


def kind_of(metric: str) -> Kind:
    """How a metric is drawn."""
    title = metric.removeprefix(_UPDATES).replace("/", ", ") if metric.startswith(_UPDATES) else ""
    return KINDS.get(metric) or Kind(title, log=any(fnmatchcase(metric, p) for p in _LOG))


def metrics_of(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Section -> the metrics in it that some run has; each metric in the first that names it."""
    rows = [row for arm in arms for run in arm.runs for row in run.rows]
    have = {name for row in rows for name in row} - set(_SAME_AS_ANOTHER)
    found: dict[str, list[str]] = {}
    for section in (*SECTIONS, REST):
        for pattern in section.patterns:
            matching = sorted(name for name in have if fnmatchcase(name, pattern))
            found.setdefault(section.title, []).extend(matching)
            have -= set(matching)
    return found


def curve_of(arm: Arm, metric: str) -> Curve | None:
    """The metric's curve, None if no run of the arm has it."""
    kind = kind_of(metric)
    runs = [pairs for run in arm.runs if (pairs := run.values(metric))]
    if not runs:
        return None
    steps = sorted({step for pairs in runs for step, _ in pairs})
    place = {step: i for i, step in enumerate(steps)}
    values = np.full((len(runs), len(steps)), np.nan)
    for row, pairs in zip(values, runs, strict=True):
        seen = np.array([value for _, value in pairs])
        finite = np.isfinite(seen)
        if kind.smoothed:
            seen[finite] = smooth(seen[finite])
        row[[place[step] for step, _ in pairs]] = seen
    every = math.ceil(len(steps) / MOST_POINTS)
    bins = range(0, len(steps), every)
    parts = [values[:, i : i + every] for i in bins]
    return Curve(
        steps=np.array([steps[min(i + every, len(steps)) - 1] for i in bins]),
        middle=np.array([_over(np.max if kind.largest else np.mean, part) for part in parts]),
        low=np.array([_over(np.min, part) for part in parts]),
        high=np.array([_over(np.max, part) for part in parts]),
        lost=sum(math.isnan(value) for pairs in runs for _, value in pairs),
        every=every,
    )


def constant(curves: Iterable[Curve | None]) -> float | None:
    """The only value of these curves, if there is but one."""
    bounds = [v for c in curves if c for v in (*c.low, *c.high)]
    same = bounds and all(v == bounds[0] for v in bounds)  # never of NaN
    return float(bounds[0]) if same else None


def caption(arms: Sequence[Arm], points_of: int) -> str:
    """What a reader of the pictures must know."""
    said = [f"Training reward: moving average over {SMOOTHING_STEPS} steps."]
    if any(len(arm.runs) > 1 for arm in arms):
        said.append(
            "A line is the mean over an arm's seeds, its band reaches from the lowest to the "
            "highest; where a run has ended, they are of those that go on. The log-prob gap is the "
            "largest of all."
        )
    if points_of > 1:
        said.append(
            f"Up to {points_of} steps make one point: their mean (of the gap, their largest), in a "
            "band from the lowest to the highest."
        )
    problems = {arm.runs[0].config.get("evaluation", {}).get("problems") for arm in arms}
    if len(problems) == 1 and None not in problems:
        said.append(
            "Held-out rates are of all held-out problems before and after training, of at most "
            f"{problems.pop()} in between."
        )
    return " ".join(said)


def _over(function: Callable[[np.ndarray], float], values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(function(finite)) if finite.size else math.nan
