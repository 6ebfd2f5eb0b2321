"""TROUBLESHOOTING.md tells of messages that the code has, and of all that a run's doors have."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "TROUBLESHOOTING.md").read_text()
TOLD = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", TEXT, re.MULTILINE)
# What these modules refuse, a user meets: whoever adds a message there adds a row here.
DOORS = (
    "mesh.py",
    "own_code.py",
    "parity.py",
    "processes.py",
    "startup.py",
    "checkpoint/run_state.py",
    "checkpoint/source.py",
    "runs/faults.py",
    "runs/folder.py",
    "runs/resuming.py",
)
# Not for users: made by other code alone, or made up of a message that has a row.
NOT_TOLD = ("summary: missing keys", ": : ")
HOLE = "\0"  # where a message has a value


@functools.cache
def messages(path: Path) -> list[str]:
    """All texts of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [text(n) for n in nodes if isinstance(n, ast.JoinedStr | ast.Constant)]


def refusals(path: Path) -> list[str]:
    """What a file raises as a ValueError or a RuntimeError; of faults.py what it returns."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if raised and getattr(node.exc.func, "id", "") in ("ValueError", "RuntimeError"):
            found.append(text(node.exc.args[0]))
        elif path.name == "faults.py" and isinstance(node, ast.Return):
            found.append(text(node.value))
    return found


def text(node: ast.expr) -> str:
    """A text in the code, with HOLE for what is filled in; nothing of what is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(v) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    return node.value if isinstance(getattr(node, "value", None), str) else ""


def pattern(told: str) -> re.Pattern:
    """Finds a told message in a text of the code: `…` is any part of it, holes among it."""
    return re.compile(".*".join(map(re.escape, told.split("…"))), re.DOTALL)


def test_the_table_is_read():
    assert len(TOLD) > 70
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    without = [line for line in rows if not re.match(r"\| `.+?` \| .+ \| .+ \|$", line)]
    assert all(line.count("|") == 3 for line in without)  # of the last table, which has no messages


@pytest.mark.parametrize("told", TOLD)
def test_each_message_that_is_told_is_still_in_the_code(told):
    words = max(told.split("…"), key=len)
    assert len(words) > 8, "too short to be found again"
    files = (ROOT / "orbit_jax").rglob("*.py")
    assert any(pattern(told).search(text) for file in files for text in messages(file))


@pytest.mark.parametrize("door", DOORS)
def test_each_message_of_a_door_is_told(door):
    patterns = [pattern(told) for told in TOLD]
    for message in refusals(ROOT / "orbit_jax" / door):
        plain = message.replace(HOLE, "")
        if plain and not plain.startswith(NOT_TOLD):
            assert any(p.search(message) for p in patterns), message.replace(HOLE, "…")
