"""The words of a report's page: text that means nothing to a browser, numbers, tables.

Whatever comes from a run goes through `text`: a completion may hold markup, marks that turn the
direction of writing, or halves of characters.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Control characters but for tab and newline, and those that turn the direction of writing.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SHARES = re.compile(r"pass_|fraction|share|^stop/|^turns/cut|flat_groups")


def text(value: Any) -> str:
    """A value as text of a page: escaped, and what cannot be seen made visible."""
    shown = str(value).encode("utf-8", "replace").decode()
    return html.escape(_UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", shown))


def number(value: float | None, metric: str = "") -> str:
    """A number of a metric in a few digits, a share in percent; 0 is exactly 0."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if is_share(metric):
        return f"{value:.1%}" if abs(value) >= 1e-3 else f"{value:.1e}"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is read in percent."""
    return bool(_SHARES.search(metric))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of markup; the first cell of a row is its head."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(title: str, content: str) -> str:
    """Markup that opens when its title is clicked."""
    return f"<details><summary>{title}</summary>{content}</details>"


def plural(count: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
