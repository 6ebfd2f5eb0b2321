"""What experiments print: tables, and numbers as people read them."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def size(nbytes: float) -> str:
    """Bytes in powers of 1,000."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= one:
            return f"{nbytes / one:,.2f} {unit}"
    return f"{nbytes:.0f} B"


def quantity(number: int) -> str:
    """A number of parameters: `1,026.4 G`, `1,363 M` or, below ten million, itself."""
    if number >= 10**10:
        return f"{number / 1e9:,.1f} G"
    return f"{number / 1e6:,.0f} M" if number >= 10**7 else f"{number:,}"


def table(
    console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Prints rows, the first column to the left, numbers to the right."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    console.print()
    console.print(title, style="bold")
    console.print(shown)
