"""The task `sums`: generated arithmetic, answered in one turn."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from orbit_jax.tasks.grading import grade
from orbit_jax.tasks.problems import TRAINED_DIFFICULTIES, UNSEEN_DIFFICULTY, generate_problems
from orbit_jax.tasks.task import Example, Score, Splits, Tool, Transcript, posed


@dataclass(frozen=True)
class Sums:
    """Sums of graded difficulty, or the other families of `problems`.

    Attributes:
        seed, train, heldout, unseen, difficulties, unseen_difficulty: as of `generate_problems`.
        system: a system message before each problem; empty for none.
    """

    seed: int = 0
    train: int = 10_000
    heldout: int = 500
    unseen: int = 500
    difficulties: tuple[str, ...] = TRAINED_DIFFICULTIES
    unseen_difficulty: str = UNSEEN_DIFFICULTY
    system: str = ""
    name: str = "sums"
    tools: tuple[Tool, ...] = ()

    def examples(self, split: str) -> Sequence[Example]:
        """Return those of `train`, `heldout` and `unseen`; which, the prompt's text decides."""
        return self._splits.get(split, ())

    def messages(self, example: Example) -> list[dict[str, str]]:
        """Return the problem as the user's words."""
        return posed(example, self.system)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """Return 1 for the right number in the last turn."""
        found = grade(transcript[-1].text, example.answer)
        return Score(found.value, found.outcome)

    @functools.cached_property
    def _splits(self) -> Splits:
        sizes = (self.train, self.heldout, self.unseen)
        kinds = (self.difficulties, self.unseen_difficulty)
        return generate_problems(self.seed, *sizes, *kinds, task=self.name)
