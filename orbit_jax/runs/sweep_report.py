"""What is printed of a sweep: a table of its settings over their seeds."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from orbit_jax.runs.grid import Cell
from orbit_jax.runs.printing import table
from orbit_jax.runs.sweeps import Sweep

WIDTH = 180  # at most
GAP = "parity_max_abs_diff"
HEADS = {"heldout_pass_before": "before", "heldout_pass_after": "after", GAP: "largest gap"}


def show(sweep: Sweep, measures: Sequence[str]) -> None:
    """Prints medians, means and intervals of each setting, then what is not in them."""
    console = Console(width=WIDTH)
    heads = ("setting", "", *(HEADS.get(m, m.replace("_", " ")) for m in measures))
    rows = [cells for row in sweep.table(measures) for cells in _rows(row, measures)]
    table(console, f"{sweep.folder}", heads, rows)
    for text in remarks(sweep):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def remarks(sweep: Sweep) -> list[str]:
    """What a reader of the table must know."""
    said = ["95%: of the mean over seeds, by Student's t, as if they were normal; one has none"]
    commits = {c.commit for c in sweep.cells if c.figures}
    if len(commits) > 1:
        said.append(f"runs are of {len(commits)} commits: {', '.join(map(str, commits))}")
    by_state: dict[str, list[Cell]] = {}
    for cell in sweep.cells:
        by_state.setdefault(sweep.state(cell), []).append(cell)
    said += [f"failed: {cell.name}: {cell.error}" for cell in by_state.get("failed", ())]
    for state in ("unfinished", "waiting"):
        if state in by_state:
            said.append(f"{state}: {'; '.join(cell.name for cell in by_state[state])}")
    return said


def _rows(row: dict[str, Any], measures: Sequence[str]) -> Iterator[Sequence[str]]:
    """The lines of one setting."""
    found, count = row["measures"], len(row["seeds"])
    # A gap that one seed has must not vanish in a median.
    middle = (
        max(found[m]["values"], default=None) if m == GAP else found[m]["median"] for m in measures
    )
    yield (row["setting"], "median" if count > 1 else "1 seed", *map(_text, measures, middle))
    if count > 1:
        means = (_text(m, None if m == GAP else found[m]["mean"]) for m in measures)
        yield (f"  {count} seeds", "mean", *means)
        yield ("", "95%", *(_interval(m, found[m]) for m in measures))


def _interval(measure: str, found: dict[str, Any]) -> str:
    if found["low"] is None or measure == GAP:
        return ""
    low, high = (_text(measure, found[side]).rstrip("%") for side in ("low", "high"))
    return f"[{low}, {high}]"


def _text(measure: str, value: float | None) -> str:
    if value is None:
        return "" if measure == GAP else "-"
    if measure == "gain" or "pass" in measure:
        return f"{value:+.1%}" if measure == "gain" else f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
