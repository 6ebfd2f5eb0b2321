"""Dialogues without tools: a simulated user answers each of the assistant's turns by a rule.

A user's turns go the way of tool outputs (`transcript.add_user`).
"""

import re
from dataclasses import dataclass
from typing import Protocol

from orbit_jax.tasks.task import Example, Transcript

_WHOLE_NUMBER = re.compile(r"-?\d{1,18}(?!\d)")


class UserSimulator(Protocol):
    """Somebody who talks with the assistant."""

    def reply(self, example: Example, transcript: Transcript) -> str | None:
        """What the user says to a transcript that ends with the assistant; None to end it.

        A function of its arguments, called from threads. One that raises, or is later than a tool
        may be (`config.tools.max_seconds`), ends the dialogue.
        """
        ...


@dataclass(frozen=True)
class HigherLower:
    """A user who thinks of a number, the example's answer, and tells how guesses compare.

    The last whole number of a turn is the guess. The dialogue ends with the right guess, or after
    `max_turns` of the assistant's.
    """

    max_turns: int = 8

    def reply(self, example: Example, transcript: Transcript) -> str | None:
        """`higher`, `lower`, or a request for a number; None when it is over."""
        guesses = [turn.text for turn in transcript if turn.role == "assistant"]
        guess, number = read_guess(guesses[-1]) if guesses else None, int(example.answer)
        if len(guesses) >= self.max_turns or guess == number:
            return None
        if guess is None:
            return "guess a number"
        return "higher" if guess < number else "lower"


def read_guess(text: str) -> int | None:
    """The last whole number of a turn; None if there is none."""
    numbers = _WHOLE_NUMBER.findall(text.replace("\u2212", "-"))
    return int(numbers[-1]) if numbers else None
