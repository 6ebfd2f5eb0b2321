"""The picture of a sweep: a measure over its settings, and its learning curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from orbit_jax.runs.grid import Cell, numeric, order, shown
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.plots import COLOURS, INK, plain, series, smooth
from orbit_jax.runs.sweeps import Sweep

BEFORE, AFTER = "heldout_pass_before", "heldout_pass_after"
CURVE = "reward/mean"
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
_DECADE = 10
_MOST_TICKS = 8  # that are labelled one by one
_FAINT_LINE = "#a6a6a6"


class Row(NamedTuple):
    """A setting: the value of the first field, the others in words, and its finished runs."""

    x: Any
    others: str
    cells: Sequence[Cell]


def draw(sweep: Sweep, measures: Sequence[str], path: Path) -> None:
    """Draws what the finished runs have come to, as a PNG.

    To the left a measure, the held-out pass rate after training or where that is not among them the
    first: a point a run over the values of the first field, a line through the medians over seeds
    for each setting of the others. To the right the smoothed training reward over the steps: its
    median over seeds, in a band from the lowest to the highest. Colours tell values of the first
    field, lines those of the others.
    """
    rows = [
        Row(values[0] if values else "", sweep.label(values, begin=1), cells)
        for values, cells in sweep.settings()
    ]
    xs, lines = order([row.x for row in rows]), order([row.others for row in rows])
    colours = dict(zip(map(shown, xs), _colours(len(xs)), strict=True))
    styles = {line: i % len(LINES) for i, line in enumerate(lines)}
    figure = Figure(figsize=(10.4, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(wspace=0.05)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    measure = AFTER if AFTER in measures else measures[0]
    _draw_measure(left, rows, measure, xs, colours, styles)
    left.set(ylabel=measure.replace("_", " "), xlabel=sweep.fields[0] if sweep.fields else "")
    for row in rows:
        _draw_curve(right, sweep, row, colours[shown(row.x)], LINES[styles[row.others]])
    right.set(ylabel="training reward: median and range over seeds", xlabel="step")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(xs) > 1:
        named = [Line2D([], [], color=c, linewidth=3, label=x) for x, c in colours.items()]
        title = sweep.short(sweep.fields[0])
        right.legend(handles=named, title=title, frameon=False, fontsize=9)
    for axes in (left, right):
        plain(axes)
    figure.savefig(path)


def _draw_measure(
    axes: Axes,
    rows: Sequence[Row],
    measure: str,
    xs: Sequence[Any],
    colours: Mapping[str, str],
    styles: Mapping[str, int],
) -> None:
    number = numeric(xs)
    place = (lambda x: x) if number else xs.index
    for line, style in styles.items():
        own = [row for row in rows if row.others == line]
        look = {"linestyle": LINES[style], "color": INK, "linewidth": 1.4, "zorder": 2}
        axes.plot(*_medians(own, measure, place), **look)
        if measure == AFTER:
            look |= {"color": _FAINT_LINE, "linewidth": 1.0}
            axes.plot(*_medians(own, BEFORE, place), **look, marker="_", markersize=14)
        for row in own:
            seeds = [c.figures[measure] for c in row.cells if measure in c.figures]
            dots = {"s": 30, "marker": MARKERS[style], "color": colours[shown(row.x)]}
            axes.scatter([place(row.x)] * len(seeds), seeds, alpha=0.75, zorder=3, **dots)
    handles = [
        Line2D([], [], color=INK, linestyle=LINES[i], marker=MARKERS[i], label=line)
        for line, i in styles.items()
        if line
    ]
    if measure == AFTER:
        handles.append(Line2D([], [], color=_FAINT_LINE, marker="_", label="before training"))
    if handles:
        axes.legend(handles=handles, frameon=False, fontsize=9)
    if number and min(xs) > 0 and max(xs) >= _DECADE * min(xs):
        axes.set_xscale("log")
    if not number or len(xs) <= _MOST_TICKS:
        axes.set_xticks([place(x) for x in xs], [shown(x) for x in xs])
        axes.xaxis.set_minor_locator(NullLocator())
    if not number:
        axes.set_xlim(-0.5, len(xs) - 0.5)


def _medians(rows: Sequence[Row], measure: str, place: Any) -> tuple[list[float], list[float]]:
    found = [
        (place(row.x), [c.figures[measure] for c in row.cells if measure in c.figures])
        for row in rows
    ]
    known = [(x, float(np.median(values))) for x, values in found if values]
    return [x for x, _ in known], [y for _, y in known]


def _draw_curve(axes: Axes, sweep: Sweep, row: Row, colour: str, line: str) -> None:
    curves = [series(read_metrics(sweep.path(cell)), CURVE) for cell in row.cells]
    length = min(len(steps) for steps, _ in curves)
    if not length:
        return
    steps = curves[0][0][:length]
    smoothed = np.stack([smooth(values)[:length] for _, values in curves])
    dot = {"marker": "."} if length == 1 else {}  # there is no line of it
    axes.plot(steps, np.median(smoothed, axis=0), color=colour, linestyle=line, **dot)
    axes.fill_between(
        steps, smoothed.min(0), smoothed.max(0), color=colour, alpha=0.15, linewidth=0
    )


def _colours(count: int) -> list[str]:
    """Different ones, however many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, count))
    return [matplotlib.colors.to_hex(shade) for shade in shades]
