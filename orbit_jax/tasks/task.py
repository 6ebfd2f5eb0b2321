"""What a task is made of: examples, transcripts, scores and tools."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

OUTCOMES = ("scored", "parse_failure", "infra_failure", "truncated")


@dataclass(frozen=True)
class Example:
    """One thing to do, and what tells whether it was done.

    Attributes:
      id: unique within its data.
      prompt: text, or chat messages with `role` and `content`.
      answer: the reference as text; empty where `extra` has what a grader needs.
      task: name of the task that grades it.
      difficulty, source: for metrics; empty for none.
      extra: whatever else the task needs, such as the tests of a program.
    """

    id: str
    prompt: str | tuple[dict[str, str], ...]
    answer: str
    task: str = "math"
    difficulty: str = ""
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What it is known by among the examples of all tasks."""
        return f"{self.task}/{self.id}"


@dataclass(frozen=True)
class Turn:
    """One part of what follows a prompt: `assistant` was sampled, `tool` and `user` were given."""

    role: str
    text: str


Transcript = Sequence[Turn]
Splits = Mapping[str, tuple[Example, ...]]  # `train`, `heldout`, and others that there are


@dataclass(frozen=True)
class Score:
    """What a transcript earns.

    Attributes:
      value: the reward; NaN for an `infra_failure`, which is masked and counted, never scored 0.
      outcome: one of `OUTCOMES`.
      details: named parts of the reward and what explains it, for logs.
    """

    value: float
    outcome: str
    details: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"Score.outcome={self.outcome!r}: use one of {', '.join(OUTCOMES)}")
        if math.isnan(self.value) != (self.outcome == "infra_failure"):
            raise ValueError(
                f"Score.value={self.value} with outcome {self.outcome!r}: NaN belongs to "
                "infra_failure alone"
            )


class ToolSession(Protocol):
    """A tool as one rollout has it; it may keep state between calls."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The output of one call, as text; what goes wrong is told in it."""
        ...

    def close(self) -> None:
        """Gives back what the session holds."""
        ...


class Tool(Protocol):
    """A tool that a model may call.

    Attributes:
      name, description: as the chat template shows them.
      parameters: JSON schema of the arguments.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def start(self) -> ToolSession:
        """A session for one rollout."""
        ...


class Task(Protocol):
    """Examples, how they are posed, and what a transcript earns.

    One that talks with somebody also has an attribute `user`, a `dialogue.UserSimulator`.
    """

    name: str
    tools: tuple[Tool, ...]

    def examples(self, split: str) -> Sequence[Example]:
        """Those of `train`, `heldout` or another split; empty where there are none."""
        ...

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The chat messages that pose it."""
        ...

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """What the transcript earns; called from threads, and given up when it takes too long."""
        ...


def posed(example: Example, system: str = "") -> list[dict[str, str]]:
    """The chat messages of an example: those of a chat as they are, text as the user's words.

    Args:
      system: a system message before text; empty for none.
    """
    if not isinstance(example.prompt, str):
        return [dict(message) for message in example.prompt]
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": example.prompt}]
