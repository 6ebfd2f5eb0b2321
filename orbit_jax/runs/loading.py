"""How far the loading of weights is, shown where it takes longer than a moment."""

import time

from rich.console import Console

from orbit_jax import processes
from orbit_jax.runs.progress import Progress

_MOMENT = 2.0  # seconds: what loads faster says nothing


class Loading:
    """Shows megabytes, rate and ETA; called by a loader with the bytes done and those in total."""

    def __init__(self, console: Console | None = None):
        self._console = console
        self._began = time.monotonic()
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Tells that `done` of `total` bytes are where they stay; of several processes one does."""
        if not processes.is_first():
            return
        if self._progress is None:
            if time.monotonic() - self._began < _MOMENT or done == total:
                return
            self._progress = Progress(
                total // 10**6, log=lambda _: None, console=self._console, unit="MB"
            )
            self._progress.__enter__()
        self._progress.update(done // 10**6, {})
        if done == total:
            self._progress.__exit__()
            self._progress = None
