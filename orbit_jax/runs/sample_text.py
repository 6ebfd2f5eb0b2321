"""A sample as people read it: coloured in a terminal, as Markdown in TensorBoard.

What a model has said may hold anything. Nothing of it reaches a terminal that would obey it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

Sample = Mapping[str, Any]  # a row of `samples/`

MOST_CHARACTERS = 4000  # of a sample; what is longer is cut in the middle of its parts
_GIVEN = "italic yellow"
_STYLES = {"prompt": "bright_black", "assistant": "cyan", "tool": _GIVEN, "user": _GIVEN}


class Coloured(NamedTuple):
    """A sample for the terminal: what is known of it, the prompt, what follows, its own colour."""

    facts: Text
    prompt: Text
    completion: Text
    style: str


def best_and_worst(samples: Sequence[Sample]) -> tuple[Sample, Sample]:
    """The first of those with the highest reward, and with the lowest; without one is lowest."""

    def reward(sample: Sample) -> float:
        value = sample["reward"]
        return -math.inf if value is None or math.isnan(value) else value

    return max(samples, key=reward), min(samples, key=reward)


def coloured(sample: Sample, title: str) -> Coloured:
    """Dim what asked, in one colour what the model sampled, in another what was given to it."""
    reward, outcome = _reward(sample), sample["outcome"]
    style = "yellow" if outcome != "scored" else "green" if reward > 0 else "red"
    sampled = sum(sample["sampled"])
    given = len(sample["sampled"]) - sampled
    facts = Text.assemble(
        (title, "bold"),
        (f"  reward {reward:.3g}", f"bold {style}"),
        (f"  {outcome}", style),
        (f"  {sampled} tokens sampled", _STYLES["assistant"]),
        (f"  {given} given" if given else "", _GIVEN),
    )
    prompt, *turns = [Text(text.replace("\n", "↵"), _STYLES[role]) for role, text in _parts(sample)]
    return Coloured(facts, prompt, Text("\n").join(turns), style)


def as_texts(samples: Sequence[Sample]) -> dict[str, str]:
    """A few of a step's samples for TensorBoard: name -> Markdown."""
    if not samples:
        return {}
    best, worst = best_and_worst(samples)
    return {"samples/best": _markdown(best), "samples/worst": _markdown(worst)}


def _markdown(sample: Sample) -> str:
    """Headings, and the texts as blocks of code, in which nothing has a meaning of its own."""
    names = {"prompt": "prompt", "assistant": "sampled", "tool": "given by a tool"}
    names["user"] = "given by the user"
    blocks = [
        f"**{names[role]}**\n\n" + "\n".join(f"    {line}" for line in text.split("\n"))
        for role, text in _parts(sample)
    ]
    return "\n\n".join([f"reward {_reward(sample):.3g}, {sample['outcome']}", *blocks])


def printable(text: str) -> str:
    """The text with signs in place of what a terminal obeys, hides or turns round; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else _sign(c) for c in text)


def _sign(character: str) -> str:
    if character < " " and character != "\t":
        return chr(0x2400 + ord(character))  # ␛ of an escape
    return " " if character.isspace() else "�"


def _parts(sample: Sample) -> list[tuple[str, str]]:
    """The prompt and the turns, printable, all together about MOST_CHARACTERS long."""
    prompt = sample["prompt"]
    if not isinstance(prompt, str):  # messages of a chat
        prompt = "\n".join(str(message["content"]) for message in prompt)
    parts = [("prompt", prompt), *sample["turns"]]
    share = max(MOST_CHARACTERS // len(parts), 40)
    return [(role, printable(_shortened(text, share))) for role, text in parts]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _reward(sample: Sample) -> float:
    return math.nan if sample["reward"] is None else sample["reward"]
