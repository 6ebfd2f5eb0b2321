"""Stopping between steps: Ctrl-C sets a flag, because inside a step the state is donated."""

import os
import signal
import threading
from types import FrameType
from typing import Self

from orbit_jax import processes

MESSAGE = b"\nStopping after this step; press Ctrl-C once more to stop at once.\n"


class StopFlag:
    """Within `with StopFlag() as stop`, SIGINT and SIGTERM set `stop.requested`.

    Of several processes a signal to one stops all: all must read it at the same point of the loop.
    A second SIGINT raises KeyboardInterrupt. Earlier handlers come back at the end. Off the main
    thread, where Python allows no handlers, the flag stays False.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._earlier = {}

    @property
    def requested(self) -> bool:
        """Whether this process, or another, was told to stop."""
        return bool(processes.from_all(self._signalled).any())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        os.write(2, MESSAGE)  # print() may not be re-entered from a signal handler
