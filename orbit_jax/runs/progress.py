"""Progress of a run: live on a terminal, one line per interval elsewhere, both in the log."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Shown(NamedTuple):
    """How a metric reads in the progress view."""

    label: str
    form: str  # of str.format


METRICS = {
    "reward/mean": Shown("reward", "{:.3f}"),
    "heldout/pass_greedy": Shown("held-out greedy", "{:.1%}"),
    "heldout/pass_sampled": Shown("held-out sampled", "{:.1%}"),
    "parity/max_abs_diff": Shown("log-prob gap", "{:.3g}"),
    "adapter/update_size": Shown("adapter update", "{:.1e}"),
    "entropy": Shown("entropy", "{:.3f}"),
    "completion/length_mean": Shown("length", "{:.1f}"),
    "tokens_per_second": Shown("tokens/s", "{:,.0f}"),
    "seconds/step": Shown("s/step", "{:.2f}"),
}
RECENT_STEPS = 20  # the rate is that of the last steps


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
        self._values: dict[str, float] = {}
        self._times = deque([(start, time.monotonic())], maxlen=RECENT_STEPS + 1)
        self._last_line = float("-inf")
        self._live = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._view, console=self._console, refresh_per_second=4
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
        self._times = deque([(self._done, time.monotonic())], maxlen=RECENT_STEPS + 1)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `step` steps are done; metrics that are not given keep their last value."""
        if step != self._done:
            self._done = step
            self._times.append((step, time.monotonic()))
        new = {name: float(metrics[name]) for name in METRICS if metrics.get(name) is not None}
        # An evaluation is shown where it was made: an old one would pass for a new measurement.
        kept = {k: v for k, v in self._values.items() if not k.startswith("heldout/") or self._live}
        self._values = kept | new
        now = time.monotonic()
        due = now - self._last_line >= self._interval_seconds or step == self._total
        if due or any(name.startswith("heldout/") for name in new):
            self._last_line = now
            self._line(self._summary())

    def note(self, text: str) -> None:
        """Shows and logs a line of its own, above the live view."""
        if self._live:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._log(text)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        self._log(text)
        if not self._live:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _summary(self) -> str:
        percent = f"{self._done / max(self._total, 1):4.0%}"
        parts = [f"{self._unit} {self._done}/{self._total} {percent}", *self._pace()]
        parts += [f"{shown.label} {text}" for shown, text in self._shown()]
        return "  ".join(parts)

    def _view(self) -> Group:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=max(self._total, 1), completed=self._done, width=32),
            Text(f"{self._unit} {self._done}/{self._total}", style="bold"),
            *(Text(text, style="cyan") for text in self._pace()),
        )
        values = [
            Text.assemble((f"{shown.label} ", "dim"), (text, "bold"))
            for shown, text in self._shown()
        ]
        return Group(bar, Text("   ").join(values))

    def _shown(self) -> list[tuple[Shown, str]]:
        return [
            (shown, shown.form.format(self._values[name]))
            for name, shown in METRICS.items()
            if name in self._values
        ]

    def _pace(self) -> list[str]:
        """Rate and time left, once a step has been timed."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step <= first_step or last_time <= first_time:
            return []
        steps_per_second = (last_step - first_step) / (last_time - first_time)
        seconds_left = (self._total - self._done) / steps_per_second
        units = "steps" if self._unit == "step" else self._unit
        return [f"{steps_per_second:.2f} {units}/s", f"ETA {_clock(seconds_left)}"]


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
