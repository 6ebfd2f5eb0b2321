"""Conversations of a batch of rollouts: what the sampler asks when a row's turn is over.

`rl.rollouts.generate` calls `ended` and `replies`. A turn with tool calls is answered by their
outputs, any other by the simulated user, if there is one. Tools and users run in threads while
other rows decode, with one limit of time: a tool that is late is answered for, a user that is late
or fails ends the dialogue.
"""

import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_jax.tasks.call_readers import ToolCall
from orbit_jax.tasks.chats import Chat
from orbit_jax.tasks.dialogue import UserSimulator
from orbit_jax.tasks.task import Example, Transcript
from orbit_jax.tasks.tools import RolloutTools, ToolPool, ToolResult, tell_fault
from orbit_jax.tasks.transcript import (
    Conversation,
    add_outputs,
    add_sampled,
    add_user,
    begin,
    calls_of,
)

_logger = logging.getLogger(__name__)


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
      pool: runs the tools and asks the users; its limits are of both.
      max_turns: of the assistant's in a row; calls in the last one go unanswered.

    Attributes:
      cut: rows that could not go on, as the chat template would have written the past anew.
      failed: what was wrong with the user of a row, where that ended its dialogue.
    """

    def __init__(self, rows: Sequence[Asked], pool: ToolPool, max_turns: int):
        self.rows, self.pool, self.max_turns = rows, pool, max_turns
        self.cut: set[int] = set()
        self._conversations = [row.begun for row in rows]
        self._tools = [RolloutTools(row.chat.tools) for row in rows]
        self._asked_at: dict[int, Conversation] = {}  # before the last that was said to a row
        self._calls: dict[int, tuple[ToolCall, ...]] = {}  # of rows that wait for tools
        self._counts: Counter[str] = Counter()
        self.failed: dict[int, str] = {}

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
        if asked.user is None:
            return False
        listener = _Listener(asked.user, asked.example, conversation.turns)
        self.pool.submit(row, (ToolCall("user"),), listener)
        return True

    def replies(self, wait: bool) -> dict[int, list[int]]:
        """Ids that go behind rows; none where a conversation is cut, or its user says no more."""
        limit = self.pool.max_seconds if wait else 0.0
        while True:
            done = self.pool.collect(limit)
            if done or not wait:
                return {row: self._answer(row, results) for row, results in done.items()}

    def transcript(self, row: int, ids: Sequence[int]) -> Transcript:
        """What followed the prompt, as texts, of a row that is over.

        What was said to it and found no room among its ids is no part of it.
        """
        conversation = self._take(row, ids)
        if len(ids) < len(conversation.prompt) + len(conversation.ids):
            conversation = self._asked_at[row]
        return conversation.turns

    def counts(self) -> dict[str, float]:
        """Metrics: calls of tools and replies of users by outcome, turns, the share of rows cut.

        Of users `over` counts those that ended the dialogue themselves. None of all this where
        nothing could have been said to any row.
        """
        if not any(row.chat.tools or row.user for row in self.rows):
            return {}
        turns = [self._turns(row) for row in range(len(self.rows))]
        return dict(self._counts) | {
            "turns/mean": sum(turns) / len(turns),
            "turns/most": max(turns),
            "turns/cut": len(self.cut) / len(turns),
        }

    def _answer(self, row: int, results: Sequence[ToolResult]) -> list[int]:
        """The ids that follow from what was called, or from what the user said."""
        chat, calls = self.rows[row].chat, self._calls.pop(row, ())
        who = "tools" if calls else "users"
        self._counts.update(f"{who}/{result.outcome}" for result in results)
        if calls:
            outputs = [result.text for result in results]
            return self._go_on(row, add_outputs(chat, self._conversations[row], calls, outputs))
        (said,) = results
        if said.outcome == "ok":
            return self._go_on(row, add_user(chat, self._conversations[row], said.text))
        if said.outcome != "over":
            self.failed[row] = said.text
            if len(self.failed) == 1:
                _logger.warning("a dialogue ends early, as its user failed: %s", said.text)
        return []

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
        before = self._asked_at[row] = self._conversations[row]
        self._conversations[row] = after
        return list(after.ids[len(before.ids) :])


class _Listener:
    """A user who is asked for one reply, as a `ToolPool` asks."""

    def __init__(self, user: UserSimulator, example: Example, transcript: Transcript):
        self._user, self._asked = user, (example, transcript)

    def run(self, call: ToolCall) -> ToolResult:
        try:
            said = self._user.reply(*self._asked)
            if said is None:
                return ToolResult("", "over")
            return ToolResult(said.encode("utf-8", "replace").decode(), "ok")
        except BaseException as fault:  # a user may raise anything; nothing of it ends the run
            return ToolResult(tell_fault(fault), "error")

    def drop(self, name: str) -> None:
        """A reply holds nothing."""
