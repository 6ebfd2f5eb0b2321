"""A user's command that is called with each alert: to send a message, to stop a job."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from orbit_jax.runs.files import to_json


class _Call(NamedTuple):
    """A process of the command's, when it is late, and what it has said."""

    process: subprocess.Popen
    deadline: float
    said: IO[bytes]


class AlertCommand:
    """Starts the command and goes on at once; what comes of it is looked at later.

    Args:
      line: the command line, as for a shell, but no shell reads it; empty: nothing is called.
      max_seconds: after which a call is ended, with what it has started.
      tell: takes a sentence about a call that failed.
    """

    def __init__(self, line: str, max_seconds: float, tell: Callable[[str], None]):
        self._words, self._max_seconds, self._tell = shlex.split(line), max_seconds, tell
        self._calls: list[_Call] = []

    def call(self, alert: Mapping[str, Any]) -> None:
        """Starts the command with the alert as JSON on its standard input."""
        if not self._words:
            return
        try:
            with contextlib.ExitStack() as files:
                given, said = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                given.write(to_json(alert).encode())
                given.seek(0)
                process = subprocess.Popen(
                    self._words,
                    stdin=given,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # out of the reach of Ctrl-C
                )
                given.close()
                files.pop_all()  # what it says is read when it has ended
        except OSError as error:
            self._tell(f"alerts.command could not be started: {error}")
            return
        self._calls.append(_Call(process, time.monotonic() + self._max_seconds, said))

    def look_after(self) -> None:
        """Tells of calls that have failed, and ends those that are late."""
        now = time.monotonic()
        self._calls = [c for c in self._calls if not self._ended(c, late=now >= c.deadline)]

    def close(self) -> None:
        """Waits for the calls, as long as they may take."""
        for call in self._calls:
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.process.wait(max(call.deadline - time.monotonic(), 0))
            self._ended(call, late=True)
        self._calls = []

    def _ended(self, call: _Call, late: bool) -> bool:
        """Whether a call has ended, by itself or because it is late; then it is told and closed."""
        status = call.process.poll()
        if status is None:
            if not late:
                return False
            os.killpg(call.process.pid, signal.SIGKILL)
            call.process.wait()
            self._tell(f"alerts.command was ended: it took more than {self._max_seconds:g} s")
        elif status != 0:
            call.said.seek(0)
            lines = call.said.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            self._tell(f"alerts.command ended with status {status}: {last.strip():.200}")
        call.said.close()
        return True
