"""Progress of a run: a live view on a terminal, a line per interval elsewhere; both are logged."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.control import Control
from rich.live import Live

from orbit_jax.runs.sample_text import Coloured, Sample, best_and_worst, coloured, printable
from orbit_jax.runs.view import METRICS, View, added

RECENT_STEPS = 20  # the rate is that of the last steps
STANDING_ALERTS = 3  # stay in the view
SAMPLE_SECONDS = 5.0  # that a sample stays, to be read


class Progress:
    """Shows how far a run is. Use as a context manager.

    Args:
        total: steps of the whole run.
        log: takes each plain line (a run folder's `log`).
        start: steps that an earlier session has done.
        interval_seconds: between plain lines; new held-out figures and the last step come at once.
        console: where to show it, by default the standard output.
        unit: what is counted, as `step` or `MB`.
    """

    def __init__(
        self,
        total: int,
        log: Callable[[str], None],
        start: int = 0,
        interval_seconds: float = 10.0,
        console: Console | None = None,
        unit: str = "step",
    ):
        self._total = total
        self._unit = unit
        self._log = log
        self._interval_seconds = interval_seconds
        self._console = console or Console()
        self._done = start
        # The view is made by another thread: what it reads is replaced, never changed.
        self._history: dict[str, tuple[float, ...]] = {}
        self._alerts: tuple[str, ...] = ()
        self._sample: Coloured | None = None
        self._samples_shown = 0
        self._sample_until = float("-inf")
        self._last_line = float("-inf")
        self.start_clock()
        self._live = None
        dumb = self._console.is_dumb_terminal or not self._console.encoding.startswith("utf")
        if self._console.is_terminal and not dumb:
            self._width = self._console.width
            self._live = Live(
                get_renderable=self._fitted, console=self._console, refresh_per_second=2
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def start_clock(self) -> None:
        """From now on time is spent on steps: what came before is not in the rate."""
        self._began = time.monotonic()
        self._times = deque([(self._done, self._began)], maxlen=RECENT_STEPS + 1)

    def remember(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the metrics of steps that an earlier session has done, for the sparklines."""
        for row in rows:
            self._history = added(self._history, row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `step` steps are done; metrics that are not given keep their last value."""
        if step != self._done:
            self._done = step
            self._times.append((step, time.monotonic()))
        # An evaluation has its line where it was made: an old one would pass for a new measurement.
        heldout = {
            n for n, value in metrics.items() if n.startswith("heldout/") and value is not None
        }
        self._history = added(self._history, metrics)
        now = time.monotonic()
        due = now - self._last_line >= self._interval_seconds or step == self._total
        if due or heldout:
            self._last_line = now
            self._line(self._summary(heldout))

    def show_sample(self, samples: Sequence[Sample]) -> None:
        """Shows the best of a step's samples, or the worst, in turns; each stays to be read."""
        now = time.monotonic()
        if not self._live or not samples or now < self._sample_until:
            return
        self._sample_until = now + SAMPLE_SECONDS
        worst = self._samples_shown % 2
        self._samples_shown += 1
        title = f"{'worst' if worst else 'best'} of {len(samples)}, {self._unit} {self._done}"
        self._sample = coloured(best_and_worst(samples)[worst], title)

    def alert(self, text: str) -> None:
        """Shows and logs a line as `note` does, in a colour; the last ones stay in the view."""
        one_line = printable(text).replace("\n", " ")
        alerts = (*self._alerts, f"{self._unit} {self._done}  {one_line}")
        self._alerts = alerts[-STANDING_ALERTS:]
        self.note(text, style="bold yellow")

    def note(self, text: str, style: str | None = None) -> None:
        """Shows and logs a line of its own, above the live view."""
        text = printable(text)
        self._log(text)
        self._print(text, style)

    def _line(self, text: str) -> None:
        self._log(text)
        if not self._live:
            self._print(text)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _summary(self, heldout: set[str]) -> str:
        percent = f"{self._done / max(self._total, 1):4.0%}"
        parts = [f"{self._unit} {self._done}/{self._total} {percent}", *self._view().pace()]
        parts += [
            f"{shown.label} {shown.form.format(self._history[name][-1])}"
            for name, shown in METRICS.items()
            if name in self._history and (name in heldout or not name.startswith("heldout/"))
        ]
        return "  ".join(parts)

    def _view(self) -> View:
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        timed = last_step > first_step and last_time > first_time
        return View(
            done=self._done,
            total=self._total,
            unit=self._unit,
            per_second=(last_step - first_step) / (last_time - first_time) if timed else None,
            seconds=time.monotonic() - self._began,
            history=self._history,
            alerts=self._alerts,
            sample=self._sample,
            over=self._live is not None and not self._live.is_started,
        )

    def _fitted(self) -> View:
        """The view; in a terminal that has become narrower, instead of the lines it has wrapped."""
        if self._console.width < self._width:
            self._console.control(Control.clear(), Control.home())
        self._width = self._console.width
        return self._view()
