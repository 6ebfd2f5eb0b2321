"""Pictures of a run, drawn from its metric rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
INK, FAINT = "#333333", "#d9d9d9"
CURVES = {  # metric: name and style in the upper panel
    "reward/mean": ("training reward", {"linewidth": 1.6}),
    "heldout/pass_greedy": (
        "held-out pass, greedy",
        {"linewidth": 1.4, "marker": "o", "markersize": 5.5},
    ),
    "heldout/pass_sampled": (
        "held-out pass, temperature 1",
        {"linewidth": 1.4, "linestyle": "--", "marker": "D", "markersize": 5, "mfc": "white"},
    ),
}
GAP = "parity/max_abs_diff"
SMOOTHING_STEPS = 7


def learning_curve(rows_by_label: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws reward and held-out pass rate over the steps, the log-prob gap below, as a PNG.

    Args:
        rows_by_label: rows of `metrics.jsonl` per curve; several labels (seeds, arms) are overlaid
            in colours of their own.
        path: the PNG to write.
    """
    figure = Figure(figsize=(8.4, 6.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(rows_by_label)}
    for label, rows in rows_by_label.items():
        _draw_quality(upper, rows, colours[label], faint_too=len(colours) == 1)
    lowest, highest = upper.dataLim.intervaly if upper.has_data() else (0, 1)
    if lowest >= 0 and highest <= 1:  # rewards of other ranges take the axis that they need
        upper.set(ylim=(-0.02, 1.02), yticks=np.linspace(0, 1, 6))
    upper.set(ylabel="reward, pass rate")
    _draw_gap(lower, rows_by_label, colours)
    lower.set(ylabel="log-prob gap\nmax |train - rollout|", xlabel="step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        plain(axes)
    kinds = [Line2D([], [], color=INK, label=name, **style) for name, style in CURVES.values()]
    figure.legend(handles=kinds, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    runs = [Line2D([], [], color=c, linewidth=3, label=label) for label, c in colours.items()]
    upper.legend(handles=runs, loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path)


def plain(axes: Axes) -> None:
    """The look of all pictures: a faint grid, and no frame."""
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the metric."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def smooth(values: np.ndarray) -> np.ndarray:
    """A centred moving average, over fewer values at the ends."""
    half = SMOOTHING_STEPS // 2
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return np.asarray([window.mean() for window in windows])


def _draw_quality(
    axes: Axes, rows: Sequence[Mapping[str, Any]], colour: str, faint_too: bool
) -> None:
    for name, (_, style) in CURVES.items():
        steps, values = series(rows, name)
        if name == "reward/mean":
            if faint_too:
                axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            values = smooth(values)
        axes.plot(steps, values, color=colour, **_visible(steps) | style)


def _draw_gap(
    axes: Axes, rows_by_label: Mapping[str, Sequence[Mapping[str, Any]]], colours: Mapping[str, str]
) -> None:
    """The gap, so that exactly 0 is a line that one sees, and anything else stands out from it."""
    gaps_of = {k: series(rows, GAP) for k, rows in rows_by_label.items()}
    values = np.concatenate([np.zeros(0), *(values for _, values in gaps_of.values())])
    exact = not np.any(values)
    for i, (label, (steps, gaps)) in enumerate(gaps_of.items()):
        # Lines that all lie on 0 take turns, dash by dash, so that none hides another.
        dash = (5 * i, (5, 5 * (len(gaps_of) - 1))) if exact and len(gaps_of) > 1 else "-"
        style = {"linewidth": 2.2, "linestyle": dash, "dash_capstyle": "butt"}
        axes.plot(steps, gaps, color=colours[label], **_visible(steps) | style)
    if exact:
        axes.set(ylim=(-1, 1), yticks=[0], yticklabels=["0"])
    else:
        smallest = np.min(np.abs(values[values != 0]))
        axes.set_yscale("symlog", linthresh=smallest)  # 0 has its own place on this axis
        axes.set_ylim(bottom=-0.4 * smallest)
    zero = np.sum(values == 0)
    total = sum(GAP in row for rows in rows_by_label.values() for row in rows)  # NaN is null there
    if total:
        share = "every step" if zero == total else f"{zero} of {total} steps"
        axes.set_title(f"exactly 0 at {share}", loc="right", fontsize=9, color=INK)


def _visible(steps: np.ndarray) -> dict[str, Any]:
    """A single step has no line to draw: a dot."""
    return {"marker": "."} if len(steps) == 1 else {}
