"""What is said when a process ends without a word: JAX aborts it where another one is lost."""

import subprocess
import sys
from pathlib import Path

import jax

_LISTENER = """
import sys
words = ""
for line in sys.stdin:
    words = line
sys.stderr.write(words)
"""


class LastWords:
    """Of one of several processes: how to go on, printed by a small process that outlives it.

    JAX itself offers no place to say more (a callback for lost processes fails in jaxlib 0.10.2).
    """

    def __init__(self, folder: Path):
        self._folder, self._listener = folder, None
        if jax.process_count() > 1:
            self._listener = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LISTENER],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # out of Ctrl-C's way
            )
            self.saved(None)

    def saved(self, step: int | None) -> None:
        """Tells of the newest checkpoint, or that there is none."""
        if self._listener is not None:
            what = "nothing was saved" if step is None else f"step {step} was saved"
            print(
                f"error: process {jax.process_index()} of {jax.process_count()} ended before its "
                "run did: it was stopped, or another was lost (what JAX says above tells which, as "
                f"far as it knows); {what}: start all again with --resume {self._folder}; "
                "a lower run.checkpoint_every_steps loses less",
                file=self._listener.stdin,
                flush=True,
            )

    def take_back(self) -> None:
        """This process has spoken for itself."""
        if self._listener is not None:
            self._listener.kill()
            self._listener.communicate()
