"""Conversations of a batch of rollouts: what the sampler asks when a row's turn is over.

`rl.rollouts.generate` calls `ended` and `replies`. A turn with tool calls is answered by their
outputs, any other by the simulated user, if there is one. Tools run in threads while other rows
decode.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_jax.tasks.chats import Chat
from orbit_jax.tasks.dialogue import UserSimulator
from orbit_jax.tasks.task import Example, Transcript
from orbit_jax.tasks.tools import RolloutTools, ToolPool
from orbit_jax.tasks.transcript import (
    Conversation,
    add_outputs,
    add_sampled,
    add_user,
    begin,
    calls_of,
)


@dataclass(frozen=True)
class Asked:
    """What one row is about.

    Attributes:
      example: of the task.
      messages: that pose it.
      chat: how its conversation is written, with the task's tools.
      user: who answers turns without calls; None for nobody.
    """

    example: Example
    messages: Sequence[Mapping[str, str]]
    chat: Chat
    user: UserSimulator | None = None

    @functools.cached_property
    def begun(self) -> Conversation:
        """The conversation before anything is sampled; rows about one thing share it."""
        return begin(self.chat, self.messages)

    @property
    def prompt(self) -> list[int]:
        """Token ids."""
        return list(self.begun.prompt)


class Dialogues:
    """The conversations of a batch, by row. Use as a context manager.

    Args:
      rows: what each row is about.
      pool: runs the tools.
      max_turns: of the assistant's in a row; calls in the last one go unanswered.

    Attributes:
      cut: rows that could not go on, as the chat template would have written the past anew.
    """

    def __init__(self, rows: Sequence[Asked], pool: ToolPool, max_turns: int):
        self.rows, self.pool, self.max_turns = rows, pool, max_turns
        self.cut: set[int] = set()
        self._conversations = [row.begun for row in rows]
        self._tools = [RolloutTools(row.chat.tools) for row in rows]
        self._calls: dict[int, tuple] = {}
        self._said: dict[int, list[int]] = {}  # replies of users, until they are asked for

    def __enter__(self) -> "Dialogues":
        return self

    def __exit__(self, *_: object) -> None:
        for tools in self._tools:
            tools.close()

    def ended(self, row: int, ids: list[int]) -> bool:
        """Takes the ids of a row whose turn is over; whether something will follow."""
        asked, conversation = self.rows[row], self._take(row, ids)
        if self._turns(row) >= self.max_turns:
            return False
        calls = calls_of(asked.chat, conversation) if asked.chat.tools else ()
        if calls:
            self._calls[row] = calls
            self.pool.submit(row, calls, self._tools[row])
            return True
        said = asked.user.reply(asked.example, conversation.turns) if asked.user else None
        if said is None:
            return False
        self._said[row] = self._go_on(row, add_user(asked.chat, conversation, said))
        return True

    def replies(self, wait: bool) -> dict[int, list[int]]:
        """Ids that go behind rows; none where a conversation is cut."""
        said, self._said = self._said, {}
        while True:
            limit = self.pool.max_seconds if wait and not said else 0.0
            for row, results in self.pool.collect(limit).items():
                outputs = [result.text for result in results]
                chat, calls = self.rows[row].chat, self._calls.pop(row)
                after = add_outputs(chat, self._conversations[row], calls, outputs)
                said[row] = self._go_on(row, after)
            if said or not wait:
                return said

    def transcript(self, row: int, ids: Sequence[int]) -> Transcript:
        """What followed the prompt, as texts, of a row that is over."""
        return self._take(row, ids).turns

    def counts(self) -> dict[str, float]:
        """Metrics: calls of tools by outcome, turns of a row, and the share of rows cut.

        None where nothing could have been said to any row.
        """
        if not any(row.chat.tools or row.user for row in self.rows):
            return {}
        calls: Counter = self.pool.counts
        turns = [self._turns(row) for row in range(len(self.rows))]
        return {f"tools/{name}": count for name, count in calls.items()} | {
            "turns/mean": sum(turns) / len(turns),
            "turns/most": max(turns),
            "turns/cut": len(self.cut) / len(turns),
        }

    def _take(self, row: int, ids: Sequence[int]) -> Conversation:
        known = self._conversations[row]
        new = ids[len(known.prompt) + len(known.ids) :]
        if new:
            self._conversations[row] = add_sampled(self.rows[row].chat, known, new)
        return self._conversations[row]

    def _turns(self, row: int) -> int:
        return sum(turn.role == "assistant" for turn in self._conversations[row].turns)

    def _go_on(self, row: int, after: Conversation | None) -> list[int]:
        if after is None:
            self.cut.add(row)
            return []
        before = len(self._conversations[row].ids)
        self._conversations[row] = after
        return list(after.ids[before:])
