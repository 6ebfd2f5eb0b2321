"""The math task: what a problem says to the model, and what a completion earns.

It joins `problems` and `grading`. A reward is 1.0 for a right answer, 0.0 for a wrong one or one
that cannot be read, NaN where the grader failed (the trainer masks and counts those).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from orbit_jax.tasks.grading import Grader, grade
from orbit_jax.tasks.jsonl import load_jsonl, split_heldout
from orbit_jax.tasks.problems import (
    TRAINED_DIFFICULTIES,
    UNSEEN_DIFFICULTY,
    MathData,
    Problem,
    generate_problems,
)
from orbit_jax.tasks.task import Example, Score, Tool, Transcript


def load_data(
    jsonl: str,
    seed: int,
    train: int,
    heldout: int,
    unseen: int,
    difficulties: Sequence[str] = TRAINED_DIFFICULTIES,
    unseen_difficulty: str = UNSEEN_DIFFICULTY,
) -> MathData:
    """The problems of a run: those of a JSONL file where one is named, else generated ones.

    Of a file all problems are used that are not held out, and at most `heldout` of the others.
    """
    if jsonl:
        data = split_heldout(load_jsonl(jsonl))
        return replace(data, heldout=data.heldout[:heldout])
    return generate_problems(seed, train, heldout, unseen, difficulties, unseen_difficulty)


def problems_of_step(
    problems: Sequence[Problem], step: int, count: int, seed: int
) -> list[Problem]:
    """The `count` problems of a step: each epoch goes through all in an order of its own.

    A function of its arguments, so a resumed run needs no cursor. A step may span two epochs.
    """
    chosen = []
    for i in range(step * count, (step + 1) * count):
        epoch, place = divmod(i, len(problems))
        chosen.append(problems[_order(len(problems), seed, epoch)[place]])
    return chosen


@functools.lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def generated_examples(
    task: str, split: str, seed: int, train: int, heldout: int, difficulties: Sequence[str]
) -> tuple[Example, ...]:
    """Return generated problems of `train` or `heldout` as a task's examples; of others none."""
    unseen = "9x9"  # a difficulty of which no problem is asked for
    data = generate_problems(seed, train, heldout, 0, difficulties, unseen)
    return tuple(
        Example(problem.id, problem.prompt, problem.answer, task, problem.difficulty)
        for problem in getattr(data, split, ())
    )


@dataclass(frozen=True)
class Sums:
    """The task `sums`: generated arithmetic, answered in one turn.

    Attributes:
        seed, train, heldout, difficulties: as of `generate_problems`.
    """

    seed: int = 0
    train: int = 10_000
    heldout: int = 500
    difficulties: tuple[str, ...] = TRAINED_DIFFICULTIES
    name: str = "sums"
    tools: tuple[Tool, ...] = ()

    def examples(self, split: str) -> Sequence[Example]:
        """Return those of `train` and `heldout`; the prompt's text alone decides which."""
        size = (self.seed, self.train, self.heldout)
        return generated_examples(self.name, split, *size, self.difficulties)

    def messages(self, example: Example) -> list[dict[str, str]]:
        """Return the expression alone."""
        return [{"role": "user", "content": str(example.prompt)}]

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """Return 1 for the right number in the last turn."""
        found = grade(transcript[-1].text, example.answer)
        return Score(found.value, found.outcome)


@dataclass(frozen=True)
class MathTask:
    """Prompts and rewards of math problems.

    Attributes:
        grader: sets workers and time limit.
        system: a system message before problems that are plain text; empty for none.
    """

    grader: Grader = field(default_factory=Grader)
    system: str = ""

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """Return the chat messages that pose the problem; those of a chat stay as they are."""
        if not isinstance(problem.prompt, str):
            return [dict(message) for message in problem.prompt]
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, {"role": "user", "content": problem.prompt}]

    def rewards(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> tuple[np.ndarray, list[str]]:
        """Return values [B] (float32: 1, 0 or NaN) and outcomes [B], one per completion.

        Raises:
            ValueError: when there is not one problem per completion.
        """
        if len(problems) != len(completions):
            raise ValueError(
                f"rewards needs one problem per completion, got {len(problems)} problems and "
                f"{len(completions)} completions."
            )
        pairs = [(c, p.answer) for p, c in zip(problems, completions, strict=True)]
        grades = self.grader.grade_batch(pairs)
        values = np.array([grade.value for grade in grades], dtype=np.float32)
        return values, [grade.outcome for grade in grades]
