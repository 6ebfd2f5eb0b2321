"""What is said when a process ends without a word: JAX aborts it where another one is lost."""

import subprocess
import sys

_LISTENER = """
import sys
words = ""
for line in sys.stdin:
    words = line
sys.stderr.write(words)
"""


class LastWords:
    """A small process that outlives this one and then prints what was last prepared.

    JAX itself leaves no other place to say it (a callback of its own fails in jaxlib 0.10.2).
    """

    def __init__(self) -> None:
        self._listener: subprocess.Popen | None = None

    def prepare(self, words: str) -> None:
        """Takes one line, in the place of an earlier one."""
        if self._listener is None:
            self._listener = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LISTENER],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # out of Ctrl-C's way
            )
        print(words, file=self._listener.stdin, flush=True)

    def take_back(self) -> None:
        """This process goes on, or has spoken for itself."""
        if self._listener is not None:
            self._listener.kill()
            self._listener.communicate()
            self._listener = None
