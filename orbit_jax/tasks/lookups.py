r"""Looking things up: what a key stands for is in a corpus alone, so an answer takes a search.

`kefo` asks for a number that was drawn, not learnt; the tool `search` gives `kefo: 57`, and
`\boxed{57}` is right. Which side of the split a key is on depends on its text alone.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from orbit_jax.tasks.grading import grade
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.search import Search
from orbit_jax.tasks.task import Example, Score, Tool, Transcript, posed

SYLLABLES = tuple(c + v for c in "bdfgklmnprst" for v in "aeiou")


@dataclass(frozen=True)
class Lookups:
    """The task `lookups`.

    Attributes:
      seed: of the numbers; another one makes another corpus of the same keys.
      name, tools: as of a task; the tool searches the corpus of all keys.
    """

    seed: int = 0
    name: str = "lookups"
    tools: tuple[Tool, ...] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "tools", (Search(_corpus(self.seed)),))

    def examples(self, split: str) -> Sequence[Example]:
        """All keys of `train` or `heldout`, in an order without meaning."""
        if split not in ("train", "heldout"):
            return ()
        return tuple(
            Example(key, key, number, self.name)
            for key, number in _corpus(self.seed).items()
            if is_heldout(key) == (split == "heldout")
        )

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The key alone."""
        return posed(example)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """1 for the right number in the last turn."""
        found = grade(transcript[-1].text, example.answer)
        calls = sum(turn.role == "tool" for turn in transcript)
        return Score(found.value, found.outcome, {"calls": calls})


@functools.lru_cache(maxsize=2)
def _corpus(seed: int) -> dict[str, str]:
    """A number from 10 to 99 for each key of two syllables, in a shuffled order."""
    rng = random.Random(seed)
    keys = [first + second for first in SYLLABLES for second in SYLLABLES]
    rng.shuffle(keys)
    return {key: str(rng.randint(10, 99)) for key in keys}
