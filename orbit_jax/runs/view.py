"""The live view of a run: a bar, metrics with their recent course, alerts, the last sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orbit_jax.runs.sample_text import Coloured

GAP = "parity/max_abs_diff"
RECENT_VALUES = 40  # of a metric, one a step: what its sparkline shows
TWO_COLUMNS = 100  # a terminal so wide has metrics side by side
PROMPT_LINES, COMPLETION_LINES = 2, 6  # at most, of the sample
_BLOCKS = "▁▂▃▄▅▆▇"  # a full block would touch the line above
_BEYOND = 1e300  # no picture of that
_ALARM = "bold white on red"


class Shown(NamedTuple):
    """How a metric reads: its label, its form for `str.format`, the colour of its sparkline."""

    label: str
    form: str
    style: str = "blue"


METRICS = {
    "reward/mean": Shown("reward", "{:.3f}", "cyan"),
    "heldout/pass_greedy": Shown("held-out greedy", "{:.1%}", "cyan"),
    "heldout/pass_sampled": Shown("held-out sampled", "{:.1%}", "cyan"),
    GAP: Shown("log-prob gap", "{:.3g}"),
    "adapter/update_size": Shown("adapter update", "{:.1e}"),
    "entropy": Shown("entropy", "{:.3f}"),
    "completion/length_mean": Shown("length", "{:.1f}"),
    "tokens_per_second": Shown("tokens/s", "{:,.0f}"),
    "seconds/step": Shown("s/step", "{:.2f}"),
}
_BAR, _LABEL, _VALUE = 8, 17, 9  # columns: of the bar at least


@dataclass(frozen=True)
class View:
    """What is known of a run at one moment; rich renders it to the size that the terminal has.

    Attributes:
      done, total: of what `unit` names.
      per_second: the recent rate; None before there is one.
      seconds: since the clock was started.
      history: of METRICS, the values after each of the last steps, the newest last.
      alerts: the last ones, the newest last.
      sample: the last one.
      over: nothing follows, so that no lines need to be kept free.
    """

    done: int
    total: int
    unit: str = "step"
    per_second: float | None = None
    seconds: float = 0.0
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    alerts: tuple[str, ...] = ()
    sample: Coloured | None = None
    over: bool = False

    def pace(self) -> list[str]:
        """The rate and the time left, once there is a rate."""
        if not self.per_second:
            return []
        units = "steps" if self.unit == "step" else self.unit
        left = clock((self.total - self.done) / self.per_second)
        return [f"{self.per_second:.2f} {units}/s", f"ETA {left}"]

    def lines(self, console: Console, width: int, height: int) -> list[Text]:
        """The view in at most `height` lines of `width` columns; what has no room is left out."""
        found = [self._progress(width)]
        if self.history:
            found += [Text(), *self._metrics(width)]
        if self.alerts:
            found += [Text(), *(Text(f"▲ {text}", "bold yellow") for text in self.alerts)]
        room = height - len(found) - 2  # an empty line and the facts of the sample
        if self.sample and room > 1:
            said = _sample_lines(console, self.sample, width, room)
            most = 1 + min(PROMPT_LINES + COMPLETION_LINES, room)
            # Always as many lines, so that the view stays where it is.
            free = [] if self.over else [Text()] * (most - len(said))
            found += [Text(), *said, *free]
        for line in found:
            line.truncate(width, overflow="ellipsis")
        return found[:height]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A line that fills the terminal would wrap in some, and one row is the cursor's.
        width, height = max(options.max_width - 1, 1), max(options.max_height - 1, 1)
        for line in self.lines(console, width, height):
            line.no_wrap = True
            yield line

    def _progress(self, width: int) -> Text:
        share = min(self.done / max(self.total, 1), 1.0)
        before = Text(f"{self.unit} {self.done}/{self.total}  ", "bold")
        told = [f"  {share:4.0%}", *self.pace(), f"{clock(self.seconds)} so far"]
        while len(told) > 1 and len(before) + _BAR + len("  ".join(told)) > width:
            told.pop()
        behind = "  ".join(told)
        bar = max(min(width - len(before) - len(behind), 48), _BAR)
        full = math.floor(share * bar)
        style = "green" if share == 1 else "cyan"
        rest = ("─" * (bar - full), "bright_black")
        return Text.assemble(before, ("━" * full, style), rest, (behind, style))

    def _metrics(self, width: int) -> list[Text]:
        """A line for each metric that has a value; two of them side by side where there is room."""
        columns = 2 if width >= TWO_COLUMNS - 1 else 1
        one = width // columns - 2
        cells = [
            _metric(name, shown, self.history[name], one)
            for name, shown in METRICS.items()
            if self.history.get(name)
        ]
        rows = -(-len(cells) // columns)
        for cell in cells[:rows] if columns == 2 else ():
            cell.pad_right(one + 2 - cell.cell_len)
        return [Text().join(cells[row::rows]) for row in range(rows)]


def added(
    history: Mapping[str, tuple[float, ...]], metrics: Mapping[str, Any]
) -> dict[str, tuple[float, ...]]:
    """A `View.history` with a step more; a metric that is not given keeps its last value."""
    last = {name: values[-1] for name, values in history.items()}
    new = {name: float(metrics[name]) for name in METRICS if metrics.get(name) is not None}
    return {
        name: (*history.get(name, ()), value)[-RECENT_VALUES:]
        for name, value in (last | new).items()
    }


def sparkline(values: Sequence[float]) -> str:
    """One block a value, the lowest and the highest of them as the ends; a gap where it is NaN.

    Values that are all the same are a line in the middle, at the bottom if they are 0.
    """
    drawn = [abs(value) < _BEYOND for value in values]
    known = [value for value, draw in zip(values, drawn, strict=True) if draw]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low), low + abs(low))
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((value - low) / (high - low) * top)] if draw else " "
        for value, draw in zip(values, drawn, strict=True)
    )


def clock(seconds: float) -> str:
    """Hours, if there are any, minutes and seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _metric(name: str, shown: Shown, values: Sequence[float], width: int) -> Text:
    """Label, value and sparkline; a gap of 0 is calm, any other cannot be overlooked."""
    value, style = shown.form.format(values[-1]), "bold"
    course = Text(sparkline(values)[-max(width - _LABEL - _VALUE - 2, 1) :], shown.style)
    if name == GAP:
        value, style = (value, "bold green") if values[-1] == 0 else (f"≠ {value}", _ALARM)
        course.style = "red" if any(values) else "green"
    return Text.assemble(
        (f"{shown.label:{_LABEL}}", "bright_black"),
        " " * (_VALUE - len(value)),
        (value, style),
        "  ",
        course,
    )


def _sample_lines(console: Console, sample: Coloured, width: int, room: int) -> list[Text]:
    """The facts and at most `room` lines of what was said."""
    prompt = _wrapped(console, sample.prompt, width - 2, min(PROMPT_LINES, room // 2))
    most = min(COMPLETION_LINES, room - len(prompt))
    completion = _wrapped(console, sample.completion, width - 2, most)
    said = (sample.facts, *prompt, *completion)
    return [Text.assemble(("┃ ", sample.style), line) for line in said]


def _wrapped(console: Console, text: Text, width: int, most: int) -> list[Text]:
    """At most so many lines; of more, the first ones and the last."""
    lines = list(text.wrap(console, max(width, 2), overflow="fold"))
    if len(lines) <= most:
        return lines
    left_out = Text(f"⋯ {len(lines) - most + 1} more lines", "bright_black")
    last = lines[-1:] if most > 2 else []
    return [*lines[: most - 1 - len(last)], left_out, *last]
