r"""Rewards of named parts: correctness by the task's grader, shaped by format and length.

    rewards = Rewards(1.0, (matches(r"<think>.*</think>.*", 0.1), overlong(768, 1024, 0.5)))
    score = rewards.score(task.grade(example, transcript), Sampled(text, tokens, "eos"))

The value is the sum of weight x part. `Score.details` has every part by its name, before its
weight, so that `correctness` means the same in every run. What cannot be measured makes the whole
reward NaN, an `infra_failure`, which is masked and counted: a reward of the other parts would be
that of another task.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from orbit_jax.tasks.task import Score

CORRECTNESS = "correctness"


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a part measures.

    Attributes:
      text: that was sampled; of several turns one after another.
      tokens: number of sampled tokens.
      stop: why sampling ended, one of `sampler.STOP_REASONS`.
    """

    text: str
    tokens: int
    stop: str


class Graded(Protocol):
    """A grader's verdict: a `Score` or a `Grade`."""

    value: float
    outcome: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a reward: `measure` gives its value, which counts `weight` times."""

    name: str
    weight: float
    measure: Callable[[Sampled], float]


@dataclasses.dataclass(frozen=True)
class Rewards:
    """How a reward is made up; of correctness alone by default.

    Raises:
      ValueError: for a weight that is not finite, or a name that is given twice.
    """

    correctness: float = 1.0
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"Rewards.parts has {twice!r} twice; give each part a name of its own")
        weights = [self.correctness, *(part.weight for part in self.parts)]
        for name, weight in zip(names, weights, strict=True):
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name!r} is {weight}; it must be finite")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts."""
        return (CORRECTNESS, *(part.name for part in self.parts))

    def score(self, graded: Graded, sampled: Sampled) -> Score:
        """The whole reward of what a grader has judged."""
        values, errors = {CORRECTNESS: graded.value}, {}
        for part in self.parts:
            try:
                values[part.name] = float(part.measure(sampled))
            except Exception as error:  # a user's own part; what it fails at is not the model's
                values[part.name] = math.nan
                errors["error"] = f"{part.name}: {type(error).__name__}: {error}"
        details = {**getattr(graded, "details", {}), **values, **errors}
        total = self.correctness * graded.value
        total += sum(part.weight * values[part.name] for part in self.parts)
        if not all(map(math.isfinite, values.values())):
            return Score(math.nan, "infra_failure", details)
        return Score(total, outcome_of(graded.outcome, sampled.stop), details)


def outcome_of(outcome: str, stop: str) -> str:
    """The outcome of a rollout: one that ends by length before its answer is `truncated`.

    An answer that could be read was `scored`, however the rollout ended.
    """
    return "truncated" if outcome == "parse_failure" and stop == "length" else outcome


def matches(pattern: str, weight: float, name: str = "format") -> Part:
    r"""1 where the whole text, without white space around it, has a form; else 0.

    Args:
      pattern: a regular expression, whose `.` is any character, line ends too. Mind those that try
        without end, as `(a*)*b` does: this runs in the trainer's process.

    Raises:
      ValueError: for a pattern that is none.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"{name}: pattern {pattern!r} is no regular expression ({error}); correct it"
        ) from None
    return Part(name, weight, lambda sampled: form.fullmatch(sampled.text.strip()) is not None)


def overlong(soft_limit: int, limit: int, weight: float, name: str = "length") -> Part:
    """0 up to `soft_limit` tokens, then linearly down to -1 at `limit`, and -1 beyond.

    The soft overlong punishment of DAPO (Yu et al., 2025), with a buffer of limit - soft_limit.

    Raises:
      ValueError: unless 0 <= soft_limit < limit.
    """
    if not 0 <= soft_limit < limit:
        raise ValueError(
            f"{name}: soft_limit={soft_limit} with limit={limit}: must be at least 0 and below it"
        )
    buffer = limit - soft_limit
    return Part(
        name, weight, lambda sampled: -min(max(sampled.tokens - soft_limit, 0) / buffer, 1.0)
    )


def means(details: Sequence[Mapping[str, float | str]], group: str) -> dict[str, float]:
    """`group/<name>`, the mean of each number in the details of several scores, without NaN."""
    found: dict[str, list[float]] = {}
    for one in details:
        for name, value in one.items():
            if isinstance(value, int | float) and not math.isnan(value):
                found.setdefault(f"{group}/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
