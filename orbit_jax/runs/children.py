"""Commands run one after another as processes of their own, which a signal stops in good order."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Self

_LAST_LINES = 20  # in which a child's sentence is looked for
_PAUSE = 0.2  # seconds, after which what it said is passed on


class Children:
    """Use as a context manager, on the main thread.

    Within it Ctrl-C and SIGTERM set `stop` and end nothing here: the child that runs is told, saves
    itself, and its end is awaited.

    Args:
      keep: a file that children hold open too, as a lock.
    """

    def __init__(self, keep: IO[str]) -> None:
        self.stop = False
        self._keep = keep
        self._child: subprocess.Popen | None = None
        self._earlier = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], errors: Path) -> str:
        """Runs a command to its end.

        Its output is that of this process; its errors are passed on and kept in the file `errors`,
        into which it can go on writing should this process be killed. Returns "" if it ended with
        status 0, else how it ended, with the last thing that it said.
        """
        with errors.open("w") as file, errors.open(errors="replace") as new:
            child = subprocess.Popen(command, stderr=file, pass_fds=[self._keep.fileno()])
            self._child = child
            if self.stop:  # the signal came before there was a child to tell
                child.terminate()
            status = None
            while status is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(_PAUSE)
                sys.stderr.write(new.read())
                sys.stderr.flush()
            self._child = None
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        said = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        sentences = [line for line in said[-_LAST_LINES:] if line.startswith("error:")]
        last = (sentences or said or ["it said nothing"])[-1]
        return f"status {status}: {last}" if status else ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        if number == signal.SIGTERM and self._child:  # a terminal sends Ctrl-C to both
            self._child.terminate()
