"""A dialogue: a number is to be guessed, and its user says whether it is higher or lower.

`guess 20 to 34` is asked of each number from 20 to 34, so that no prompt gives its number away, and
halving the range finds any of them in four guesses. A split depends on the prompt's text alone.
"""

import random
from collections.abc import Sequence

from orbit_jax.tasks.dialogue import HigherLower, read_guess
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.task import Example, Score, Tool, Transcript, posed

SIZES = (7, 15)  # numbers in a range: three and four guesses
MAX_NUMBER = 99


class Guesses:
    """The task `guesses`; its user answers each guess but the right one and the last."""

    name = "guesses"
    tools: tuple[Tool, ...] = ()
    user = HigherLower(max_turns=4)

    def examples(self, split: str) -> Sequence[Example]:
        """All of `train` or `heldout`, in an order without meaning."""
        if split not in ("train", "heldout"):
            return ()
        found = [
            Example(f"{low}-{low + size - 1}-{number}", prompt, str(number), self.name, str(size))
            for size in SIZES
            for low in range(MAX_NUMBER + 2 - size)
            if is_heldout(prompt := f"guess {low} to {low + size - 1}") == (split == "heldout")
            for number in range(low, low + size)
        ]
        random.Random(0).shuffle(found)
        return tuple(found)

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The range alone."""
        return posed(example)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """1 if one of the turns that the user allows ends with the number."""
        turns = [turn.text for turn in transcript if turn.role == "assistant"]
        guesses = [read_guess(text) for text in turns[: self.user.max_turns]]
        if not any(guess is not None for guess in guesses):
            return Score(0.0, "parse_failure", {"error": "no number"})
        found = int(example.answer) in guesses
        return Score(float(found), "scored", {"guesses": float(len(guesses))})
