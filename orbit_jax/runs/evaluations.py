"""What evaluations print: a table of measures, or of two models side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from orbit_jax.runs.printing import table

WIDTH = 132


def show(found: Mapping[str, Any], measures: Sequence[str], remarks: Sequence[str]) -> None:
    """Prints a row per group of problems, a column per measure, then sentences.

    Args:
      found: `name` and `table`, with a row per group and measure.
    """
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in found["table"]:
        rows.setdefault(_group(row), {})[row["measure"]] = row
    cells = (
        (
            group,
            f"{by[measures[0]]['problems']:,}",
            *(_share(by[m], by[measures[0]]["problems"]) for m in measures),
        )
        for group, by in rows.items()
    )
    heads = ("split", "problems", *measures)
    _print(f"{found['name']}, intervals of 95% over problems", heads, cells, remarks)


def show_comparison(
    first: str,
    second: str,
    rows: Sequence[Mapping[str, Any]],
    measures: Sequence[str],
    remarks: Sequence[str],
) -> None:
    """Prints a row per group of problems and measure, then sentences."""
    cells = (
        (
            f"{_group(row)} {row['measure']}",
            f"{row['problems']:,}",
            f"{row['first']:.1%}",
            f"{row['second']:.1%}",
            f"{row['difference']:+.1%} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]",
            f"{row['better']:,} / {row['worse']:,}",
            f"{row['p_value']:.2g} {row['method']}",
        )
        for row in rows
        if row["measure"] in measures
    )
    heads = ("measure", "problems", "first", "second", "difference", "better / worse", "p")
    _print(f"{second}, second, against {first}, first", heads, cells, remarks)


def _print(title: str, heads: Sequence[str], rows: Any, remarks: Sequence[str]) -> None:
    console = Console(width=WIDTH)
    table(console, title, heads, rows)
    for text in remarks:
        console.print(text, highlight=False, soft_wrap=True)


def _group(row: Mapping[str, str]) -> str:
    return " ".join(filter(None, (row["split"], row["task"], row["difficulty"])))


def _share(row: Mapping[str, Any], problems: int) -> str:
    """A mean with its interval, and of how many problems where those are not all of the row's."""
    if not row["problems"]:
        return "-"
    low, high = 100 * row["low"], 100 * row["high"]
    fewer = f" of {row['problems']:,}" if row["problems"] != problems else ""
    return f"{row['value']:.1%} [{low:.1f}, {high:.1f}]{fewer}"
