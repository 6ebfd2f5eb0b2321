"""A picture of one metric, as SVG: a curve an arm, with its band, its letter and its last value.

Colours come from the page's style: an element of class `a0` belongs to the first arm. What a step's
values are is told where the pointer rests, by the browser itself.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbit_jax.runs.report.curves import Curve
from orbit_jax.runs.report.markup import is_share, number, text

WIDTH, HEIGHT = 440, 200
_TOP, _BOTTOM, _GAP = 10, 22, 6
_CHARACTER = 6.0  # width of a digit at the size of the labels
_LABEL_HEIGHT = 11.5
_MOST_MARKS = 40  # points that get a dot of their own
_MOST_PLACES = 60  # where the pointer finds values
_DASH = 8
_WIDE = 20  # ratio of values from which on an axis is logarithmic


class Scale(NamedTuple):
    """An axis: where a value lies, from 0 at the bottom to 1, and labels of some."""

    place: Callable[[float], float]
    labels: Mapping[float, str]


class Drawn(NamedTuple):
    """A curve in a picture: the number of its arm, and its letter, empty if there is but one."""

    arm: int
    letter: str
    curve: Curve


class Frame(NamedTuple):
    """Where the curves lie in a picture, and how values become places there."""

    left: float
    right: float
    last_step: float
    scale: Scale

    def x(self, step: float) -> float:
        """From the left edge of the picture."""
        return self.left + (self.right - self.left) * step / max(self.last_step, 1)

    def y(self, value: float) -> float:
        """From its upper edge."""
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - self.scale.place(value))


def picture(metric: str, drawn: Sequence[Drawn], last_step: int, log: bool, zero: bool) -> str:
    """The SVG of a metric.

    Args:
      drawn: at least one curve, with finite values.
      last_step: where the axis of steps ends.
      log: a logarithmic axis, where the values span enough.
      zero: 0 has a place of its own, below a logarithmic axis of all that is not 0.
    """
    bounds = np.concatenate([part for one in drawn for part in (one.curve.low, one.curve.high)])
    scale = _scale(bounds[np.isfinite(bounds)], metric, log, zero)
    ends = [_end(one, metric) for one in drawn]
    left = 8 + _CHARACTER * max(map(len, scale.labels.values()))
    right = WIDTH - 8 - _CHARACTER * max(len(label) for _, label in ends)
    frame = Frame(left, right, last_step, scale)
    shown = ", ".join(label for _, label in ends)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(metric)}: {shown}">'
        f"{_axes(frame)}{''.join(_curve(frame, one, _turn(drawn, one)) for one in drawn)}"
        f"{_end_labels(frame, drawn, ends)}{_pointed(frame, drawn, metric)}</svg>"
    )


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round values, evenly spaced in about as many steps as `most`, that enclose `low` < `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def apart(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """The places, moved as little as it takes to lie `distance` apart between low and high."""
    distance = min(distance, (high - low) / max(len(places) - 1, 1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    floor = low
    for i in order:
        moved[i] = floor = max(moved[i], floor)
        floor += distance
    ceiling = high
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= distance
    return moved


def _scale(values: np.ndarray, metric: str, log: bool, zero: bool) -> Scale:
    low, high = float(values.min()), float(values.max())
    if low == high == 0:
        return Scale(lambda value: 0.5, {0.0: "0"})
    if (zero and low >= 0) or (log and low > 0 and high / low > _WIDE):
        return _log_scale(float(values[values > 0].min()), high, zero)
    if low >= 0:
        low, high = 0.0, 1.0 if is_share(metric) and 0.5 < high <= 1 else high
    if low == high:
        low, high = low * 1.5, 0.0
    ticks = round_ticks(low, high, 6)
    labels = {tick: _label(tick, ticks[1] - ticks[0], metric) for tick in ticks}
    return Scale(lambda value: (value - ticks[0]) / (ticks[-1] - ticks[0]), labels)


def _log_scale(low: float, high: float, zero: bool) -> Scale:
    """Logarithmic; with a place for 0 beneath."""
    bottom, top = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
    foot = 0.2 if zero else 0.0
    powers = range(bottom, top + 1, math.ceil((top - bottom) / 4))

    def place(value: float) -> float:
        if value == 0:
            return 0.04
        return foot + (1 - foot) * (math.log10(value) - bottom) / (top - bottom)

    return Scale(place, ({0.0: "0"} if zero else {}) | {10.0**p: f"1e{p}" for p in powers})


def _label(tick: float, step: float, metric: str) -> str:
    """With as many digits as labels need to differ by a step."""
    if tick == 0:
        return "0"
    if step >= 1e6 or step < 1e-4:
        return f"{tick:.2g}"
    if is_share(metric):
        return f"{tick:.{max(0, -math.floor(math.log10(step * 100) + 1e-9))}%}"
    return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _axes(frame: Frame) -> str:
    parts = []
    for value, label in frame.scale.labels.items():
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        parts.append(
            f'<text class="y" x="{frame.left - _GAP:.1f}" y="{y + 3.6:.1f}">{label}</text>'
        )
    last = max(frame.last_step, 1)
    steps = [tick for tick in round_ticks(0, last, 5) if tick <= last and tick == int(tick)]
    for tick in steps:
        label = f"{tick:,.0f}" if tick != steps[-1] else f"step {tick:,.0f}"
        parts.append(f'<text class="x" x="{frame.x(tick):.1f}" y="{HEIGHT - 5}">{label}</text>')
    return "".join(parts)


def _turn(drawn: Sequence[Drawn], one: Drawn) -> str:
    """The dashes by which lines that lie on each other take turns, so that none hides another."""
    same = [other.arm for other in drawn if _same(other.curve, one.curve)]
    if len(same) < 2:
        return ""
    at = _DASH * same.index(one.arm)
    return f' style="stroke-dasharray:{_DASH} {_DASH * (len(same) - 1)};stroke-dashoffset:-{at}"'


def _same(a: Curve, b: Curve) -> bool:
    places = ((a.steps, b.steps), (a.middle, b.middle))
    return all(np.array_equal(x, y, equal_nan=True) for x, y in places)


def _curve(frame: Frame, drawn: Drawn, turn: str) -> str:
    curve, parts = drawn.curve, []
    xs = [frame.x(step) for step in curve.steps]
    known = np.isfinite(curve.middle)
    if np.any(curve.low[known] < curve.high[known]):
        for part in _stretches(known):
            upper = [(xs[i], frame.y(curve.high[i])) for i in part]
            lower = [(xs[i], frame.y(curve.low[i])) for i in reversed(part)]
            parts.append(f'<path class="band" d="M{_points([*upper, *lower])}Z"/>')
    line, dots = "", []
    for part in _stretches(known):
        line += f"M{_points([(xs[i], frame.y(curve.middle[i])) for i in part])}"
        if len(part) == 1 or (len(curve.steps) <= _MOST_MARKS and not turn):
            dots += part
    parts.append(f'<path class="line" d="{line}"{turn}/>')
    parts += [f'<circle cx="{xs[i]:.1f}" cy="{frame.y(curve.middle[i]):.1f}" r="2"/>' for i in dots]
    return f'<g class="curve a{drawn.arm}">{"".join(parts)}</g>'


def _stretches(known: np.ndarray) -> Iterable[list[int]]:
    """Indices of neighbours that are known: a curve has a hole where it is not finite."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], known.astype(int), [0]])))
    return (list(range(begin, end)) for begin, end in zip(edges[::2], edges[1::2], strict=True))


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _end(drawn: Drawn, metric: str) -> tuple[int, str]:
    """Where a curve is known last, and what stands there."""
    last = int(np.flatnonzero(np.isfinite(drawn.curve.middle))[-1])
    return last, f"{drawn.letter} {number(drawn.curve.middle[last], metric)}".strip()


def _end_labels(frame: Frame, drawn: Sequence[Drawn], ends: Sequence[tuple[int, str]]) -> str:
    places = [frame.y(one.curve.middle[end]) for one, (end, _) in zip(drawn, ends, strict=True)]
    if len(drawn) > 1 and len(frame.scale.labels) == 1:  # all are 0, as the axis says
        return ""
    moved = apart(places, _LABEL_HEIGHT, _TOP, HEIGHT - _BOTTOM)
    return "".join(
        f'<text class="end a{one.arm}" x="{frame.right + _GAP:.1f}" y="{y + 3.6:.1f}">'
        f"{label}</text>"
        for one, y, (_, label) in zip(drawn, moved, ends, strict=True)
    )


def _pointed(frame: Frame, drawn: Sequence[Drawn], metric: str) -> str:
    """Strips that tell the values of their step where the pointer rests."""
    steps = sorted({int(step) for one in drawn for step in one.curve.steps})
    steps = steps[:: math.ceil(len(steps) / _MOST_PLACES)]
    middles = [frame.x((a + b) / 2) for a, b in itertools.pairwise(steps)]
    edges = [frame.left, *middles, frame.right]
    parts = []
    for step, begin, end in zip(steps, edges[:-1], edges[1:], strict=True):
        said = [f"step {step:,}", *(told for one in drawn if (told := _told(one, step, metric)))]
        parts.append(
            f'<g class="at"><path d="M{frame.x(step):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
            f'<rect x="{begin:.1f}" y="0" width="{end - begin:.1f}" height="{HEIGHT}"/>'
            f"<title>{text(chr(10).join(said))}</title></g>"
        )
    return "".join(parts)


def _told(drawn: Drawn, step: int, metric: str) -> str:
    """A curve's value at a step, or nothing where it has none."""
    curve = drawn.curve
    i = int(np.searchsorted(curve.steps, step))
    if i == len(curve.steps) or curve.steps[i] - step >= curve.every:
        return ""
    middle, low, high = (number(float(v[i]), metric) for v in (curve.middle, curve.low, curve.high))
    band = f" ({low} to {high})" if low != high else ""
    return f"{drawn.letter} {middle}{band}".strip()
