r"""Products of several numbers, by a tool that multiplies two of them: more turns than one.

`27*43*16` is too long for the head of a tiny model, and the tool takes two numbers at a time, so a
right answer takes a turn for each product and one for `\boxed{...}`.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orbit_jax.tasks.grading import grade
from orbit_jax.tasks.problems import UNSEEN_DIFFICULTY, generate_problems
from orbit_jax.tasks.task import Example, Score, Splits, Tool, Transcript, posed

_TWO_NUMBERS = re.compile(r"\s*(\d{1,12})\s*\*\s*(\d{1,12})\s*")


class Multiply:
    """The tool `multiply`: `12*34` gives `408`."""

    name = "multiply"
    description = "Multiplies two whole numbers, as in 12*34."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"product": {"type": "string", "description": "such as 12*34"}},
        "required": ["product"],
    }

    def start(self) -> "Multiply":
        """A session; it keeps no state, so all share one."""
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The product, or what is wrong with the argument."""
        found = _TWO_NUMBERS.fullmatch(str(arguments["product"]))
        return str(int(found[1]) * int(found[2])) if found else "error: give two numbers, as 12*34"

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Products:
    """The task `products`.

    Attributes:
      seed, train, heldout: of the generated problems.
      difficulty: `product3x2` for three numbers of two digits.
    """

    seed: int = 0
    train: int = 10_000
    heldout: int = 500
    difficulty: str = "product3x2"
    name: str = "products"
    tools: tuple[Tool, ...] = (Multiply(),)

    def examples(self, split: str) -> Sequence[Example]:
        """Those of `train` and `heldout`; the prompt's text alone decides which."""
        return self._splits.get(split, ())

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The numbers alone."""
        return posed(example)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """1 for the right number in the last turn."""
        found = grade(transcript[-1].text, example.answer)
        calls = sum(turn.role == "tool" for turn in transcript)
        return Score(found.value, found.outcome, {"calls": calls})

    @functools.cached_property
    def _splits(self) -> Splits:
        size = (self.seed, self.train, self.heldout, 0)  # none of a difficulty that is not trained
        return generate_problems(*size, (self.difficulty,), UNSEEN_DIFFICULTY, task=self.name)
