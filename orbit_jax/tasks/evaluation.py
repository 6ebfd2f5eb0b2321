"""From samples to an evaluation: what each problem gives, and what all of them say.

A `Sample` is one completion with its verdict. `of_problem` turns those of a problem into measures:
`greedy`, `pass@k`, `majority@k`. `table` averages measures over the problems of a split, a task and
a difficulty, with intervals.

An infra failure is left out of its problem; a problem with fewer than k samples left has no measure
at k, and one without an answer, as of programs, no majority. All are counted.
"""

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbit_jax.tasks import statistics
from orbit_jax.tasks.answers import vote
from orbit_jax.tasks.judging import Verdict
from orbit_jax.tasks.problems import normalise_prompt
from orbit_jax.tasks.rewards import CORRECTNESS
from orbit_jax.tasks.task import Example

GREEDY = "greedy"
FILE = "results.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How problems are sampled, besides once greedily.

    Attributes:
      samples: of each problem at `temperature`; 0 for greedy answers alone.
      top_k, top_p: tokens that may be drawn; 0 and 1.0 for all.
      ks: of pass@k and majority@k; by default 1, 2, 4, ... and `samples`.

    Raises:
      ValueError: for a value that makes no sense.
    """

    samples: int = 8
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        requirements = (
            (self.samples >= 0, "samples", "must be at least 0, for greedy answers alone"),
            (0 < self.temperature <= 100, "temperature", "must be above 0 and at most 100"),
            (self.top_k >= 0, "top_k", "must be at least 0, for all tokens"),
            (0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1"),
        )
        for ok, name, remedy in requirements:
            if not ok:
                raise ValueError(f"--{name}={getattr(self, name)}: {remedy}")
        if not self.ks:
            powers = (1 << i for i in range(self.samples.bit_length()))
            object.__setattr__(self, "ks", tuple(sorted({*powers, self.samples} - {0})))
        elif not all(1 <= k <= self.samples for k in self.ks):
            raise ValueError(f"--k={self.ks}: must be from 1 to --samples={self.samples}")

    @property
    def modes(self) -> dict[str, tuple[int, dict[str, float]]]:
        """By name, completions of each problem and how they are drawn."""
        drawn = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        sampled = {"sampled": (self.samples, drawn)} if self.samples else {}
        return {GREEDY: (1, {"temperature": 0.0}), **sampled}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One rollout, as a line of the samples' file has it.

    Attributes:
      problem: its key among those of all tasks.
      turns: role and text of what followed the prompt.
      tokens: that were sampled.
      value: the grader's, NaN for an infra failure; 1 is right.
      vote: the answer as majority@k counts it, None where there is none.
    """

    problem: str
    prompt: str | tuple[dict[str, str], ...]
    answer: str
    turns: Sequence[tuple[str, str]]
    tokens: int
    value: float
    outcome: str
    stop: str
    vote: str | None


def samples_of(
    verdicts: Sequence[Verdict], tokens: Sequence[int], stops: Sequence[str]
) -> list[Sample]:
    """Verdicts [B] as samples.

    Args:
      tokens: how many were sampled; stops: why sampling ended.
    """
    return [
        Sample(
            problem=f"{one['task']}/{one['problem']}",
            prompt=one["prompt"],
            answer=one["answer"],
            turns=one["turns"],
            tokens=int(tokens[i]),
            value=float(one["parts"][CORRECTNESS]),
            outcome=one["outcome"],
            stop=stops[i],
            # What is no answer, such as a program, has no spelling that others could share.
            vote=vote(one["turns"][-1][1]) if one["answer"] else None,
        )
        for i, one in enumerate(verdicts)
    ]


def digest(prompt: str | tuple[dict[str, str], ...], answer: str) -> str:
    """What a problem is known by in another evaluation: its text and its reference."""
    return hashlib.sha256(f"{normalise_prompt(prompt)}\n{answer}".encode()).hexdigest()[:16]


def of_problem(by_mode: Mapping[str, Sequence[Sample]], ks: Sequence[int]) -> dict[str, float]:
    """The measures of one problem, from its samples by mode."""
    found = {}
    for mode, samples in by_mode.items():
        known = [one for one in samples if not math.isnan(one.value)]
        right = [float(one.value >= 1) for one in known]
        if mode == GREEDY:
            found[GREEDY] = right[0] if right else math.nan
            continue
        # What could not be read, or was cut off, votes for nothing.
        votes = [one.vote if one.outcome == "scored" else None for one in known]
        for k in ks:
            enough = k <= len(known)
            found[f"pass@{k}"] = (
                statistics.pass_at_k(len(known), int(sum(right)), k) if enough else math.nan
            )
            if k > 1:  # of one sample the majority is itself
                counts = enough and samples[0].answer
                found[f"majority@{k}"] = (
                    statistics.majority_at_k(votes, right, k) if counts else math.nan
                )
    return found


def of_problems(
    split: str,
    problems: Sequence[Example],
    by_mode: Mapping[str, Sequence[Sample]],
    ks: Sequence[int],
) -> list[dict[str, Any]]:
    """A row per problem of a split, with its measures and how many of its samples failed."""
    found: dict[str, dict[str, list[Sample]]] = {}
    for mode, samples in by_mode.items():
        for one in samples:
            found.setdefault(one.problem, {}).setdefault(mode, []).append(one)
    return [
        {
            "split": split,
            "id": problem.key,
            "digest": digest(problem.prompt, problem.answer),
            "task": problem.task,
            "difficulty": problem.difficulty,
            "outcomes": dict(
                Counter(one.outcome for of_mode in found[problem.key].values() for one in of_mode)
            ),
            "measures": of_problem(found[problem.key], ks),
        }
        for problem in problems
    ]


def table(problems: Sequence[Mapping[str, Any]], samples: int) -> list[dict[str, Any]]:
    """A row per measure of each group of problems: its mean over problems, with an interval.

    Args:
      problems: with `split`, `task`, `difficulty` and `measures`.
      samples: that a problem was sampled.
    """
    rows = []
    for group, members in groups(problems):
        for measure in members[0]["measures"]:
            values = [one["measures"][measure] for one in members]
            known = [value for value in values if not math.isnan(value)]
            low, high = statistics.share_interval(known, 1 if measure == GREEDY else samples)
            mean = sum(known) / len(known) if known else math.nan
            rows.append(
                {**group, "measure": measure, "problems": len(known), "value": mean}
                | {"low": low, "high": high, "left_out": len(values) - len(known)}
            )
    return rows


def groups(
    problems: Iterable[Mapping[str, Any]],
) -> list[tuple[dict[str, str], list[Mapping[str, Any]]]]:
    """Problems by split; then by task and by difficulty, where there are several."""
    found = []
    for split, members in _by("split", problems):
        found.append(({"split": split, "task": "", "difficulty": ""}, members))
        tasks = _by("task", members)
        for task, of_task in tasks:
            if len(tasks) > 1:
                found.append(({"split": split, "task": task, "difficulty": ""}, of_task))
            levels = _by("difficulty", of_task)
            if len(levels) > 1:
                found += [
                    ({"split": split, "task": task, "difficulty": level}, of_level)
                    for level, of_level in levels
                ]
    return found


def shown(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The measures of a table, or of a comparison, that there is room for: ends of each kind."""
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    ks = [int(measure.removeprefix("pass@")) for measure in measures if measure.startswith("pass")]
    wanted = {GREEDY, "pass@1", f"pass@{max(ks, default=0)}", f"majority@{max(ks, default=0)}"}
    return [measure for measure in measures if measure in wanted]


def choose(
    split: Callable[[str], Sequence[Example]], names: Sequence[str]
) -> dict[str, Sequence[Example]]:
    """The splits with these names; without names `heldout` and `unseen`, as far as there are.

    Args:
      split: gives the examples of a split.

    Raises:
      ValueError: for a name whose split holds nothing.
    """
    found = {name: split(name) for name in names or ("heldout", "unseen")}
    empty = [name for name in names if not found[name]]
    if empty:
        raise ValueError(
            f"--splits: no task of config.task.mixture has examples of {empty[0]!r}; name train, "
            "heldout, or another split of the data"
        )
    return {name: examples for name, examples in found.items() if examples}


def read_ks(texts: Sequence[str]) -> tuple[int, ...]:
    """Whole numbers of a command line.

    Raises:
      ValueError: if one is none.
    """
    for text in texts:
        if not text.strip().isdecimal():
            raise ValueError(f"--k: {text!r} is no whole number; write them as 1,4,16")
    return tuple(sorted({int(text) for text in texts}))


def remarks(problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a table of an evaluation does not say: samples that failed, or were cut off."""
    counts = Counter()
    for one in problems:
        counts.update(one["outcomes"])
    meaning = {
        "infra_failure": "could not be graded (infra failures) and are left out",
        "truncated": "were cut off before their answer and count as wrong",
        "parse_failure": "had no answer that could be read and count as wrong",
    }
    total = counts.total()
    return [
        f"{counts[name]:,} of {total:,} completions {text}"
        for name, text in meaning.items()
        if counts[name]
    ]


def _by(
    name: str, problems: Iterable[Mapping[str, Any]]
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in problems:
        found.setdefault(one[name], []).append(one)
    return sorted(found.items()) if name == "difficulty" else list(found.items())
