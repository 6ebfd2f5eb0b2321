"""Python as a tool: code runs in the sandbox, in an interpreter that a rollout keeps for its turns.

Nothing is executed in the trainer's process, and what code may use is what the sandbox allows.
"""

import threading
from collections.abc import Mapping
from typing import Any

from orbit_jax.tasks.sandbox import Sandbox, Session
from orbit_jax.tasks.sandbox_link import Outcome

MAX_TRACEBACK_LINES = 4  # the last of them name the error and where it was raised


class PythonTool:
    """The tool `python`: `{"code": "x = 6\\nx * 7"}` gives `42`, and `x` is there in the next call.

    A call that passes a limit of the sandbox, or crashes, ends its interpreter; the answer says so,
    and the next call has a new one. Each rollout that has called it holds a process until it is
    over. Let `Limits.wall_seconds` be less than the seconds that a call of a tool may take, so that
    the sandbox is the one to say what was wrong.

    Args:
      sandbox: where code runs; it outlives the tool.
      max_characters: of one answer.

    Raises:
      ValueError: when `max_characters` is not positive.
    """

    name = "python"
    description = (
        "Runs Python code and returns what it prints and the value of a last expression. Variables "
        "are kept between calls."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "such as sum(range(10))"}},
        "required": ["code"],
    }

    def __init__(self, sandbox: Sandbox, max_characters: int = 2000):
        if max_characters < 1:
            raise ValueError(
                f"PythonTool.max_characters={max_characters}: an answer needs at least 1"
            )
        self.sandbox, self.max_characters = sandbox, max_characters

    def start(self) -> "PythonSession":
        """An interpreter for one rollout; its process starts with the first call."""
        return PythonSession(self)


class PythonSession:
    """The interpreter of one rollout, and its successors."""

    def __init__(self, tool: PythonTool):
        self._tool = tool
        self._session: Session = tool.sandbox.session()
        self._closed = False
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any]) -> str:
        """What the code printed and the value that it ends with, or what went wrong."""
        with self._lock:  # a call that was left behind starts nothing once all is closed
            if self._session.ended and not self._closed:
                self._session = self._tool.sandbox.session()
        outcome = self._session.call(str(arguments.get("code", "")))
        if outcome.status == "ok":
            return self._cut(outcome.stdout + outcome.stderr) or "no output"
        most = self._tool.max_characters
        error = f"error: {_last_lines(outcome)[-most:]}"
        if self._session.ended:
            error += "; all variables are lost, the next call starts anew"
        printed = self._cut(outcome.stdout)
        return f"{error}\nprinted before:\n{printed}" if printed else error

    def close(self) -> None:
        """Ends the interpreter and all that it has started."""
        with self._lock:
            self._closed = True
        self._session.close()

    def _cut(self, text: str) -> str:
        text, most = text.rstrip(), self._tool.max_characters
        more = len(text) - most
        return text if more <= 0 else f"{text[:most]}... ({more} more characters)"


def _last_lines(outcome: Outcome) -> str:
    """The end of a traceback, or what the sandbox has to say."""
    *before, last = outcome.stderr.strip().splitlines() or ["the code left with an exit status"]
    if last.startswith("[sandbox: "):
        return last.removeprefix("[sandbox: ").removesuffix("]")
    return "\n".join([*before, last][-MAX_TRACEBACK_LINES:])
