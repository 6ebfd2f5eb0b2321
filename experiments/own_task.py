"""A task of one's own, to be copied: what is asked, and what an answer earns.

    python experiments/ppo_math.py --config.task.mixture="('experiments/own_task.py:Nearness',)"

Sums again, but an answer that is near earns a part of the reward: all of it when it is right, half
of it one away, a third two away. `details` are logged as metrics (`details/off_by`).
"""

import random
from collections.abc import Sequence

from orbit_jax.tasks.answers import extract_answer, read_number
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.task import Example, Score, Transcript


class Nearness:
    """Sums of three digits, graded by how far off the answer is."""

    name = "nearness"
    tools = ()  # see tasks/products.py for a task with one

    def examples(self, split: str) -> Sequence[Example]:
        """All sums of three digits; one in ten is held out, by the text of its prompt."""
        sums = ((a, b, c) for a in range(10) for b in range(10) for c in range(10))
        found = [
            Example(prompt, prompt, str(sum(numbers)), self.name)
            for numbers in sums
            for prompt in ["+".join(map(str, numbers))]
            if split == ("heldout" if is_heldout(prompt) else "train")
        ]
        random.Random(0).shuffle(found)
        return found

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The sum alone, as the base has learnt it."""
        return [{"role": "user", "content": example.prompt}]

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """From 0 to 1; text without a number is a parse failure."""
        said = extract_answer(transcript[-1].text)
        number = read_number(said) if said else None
        if number is None:
            return Score(0.0, "parse_failure")
        off = abs(float(number) - int(example.answer))
        return Score(1 / (1 + off), "scored", {"off_by": off})
