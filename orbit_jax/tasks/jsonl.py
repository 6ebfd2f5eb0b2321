"""Problems from a JSONL file: an object a line, with `prompt` and `answer`.

A prompt is text or a list of chat messages; other fields are ignored. A file with bad rows is
refused as a whole, with the line numbers, before anything is trained on it. `data` reads more kinds
of files, and more columns.
"""

from pathlib import Path

from orbit_jax.tasks.layouts import read_answer, read_prompt
from orbit_jax.tasks.problems import MathData, Problem, is_heldout, normalise_prompt
from orbit_jax.tasks.rows import parse_object

MAX_REPORTED_ROWS = 20


def load_jsonl(path: str | Path) -> tuple[Problem, ...]:
    """Return the file's problems in order; their ids are `line-<number>`.

    Raises:
        ValueError: when the file is missing, holds no problem, or holds bad rows (the first 20 are
            named with their reasons).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist; give the path of a JSONL file.")
    problems: list[Problem] = []
    faults: list[str] = []
    line_of: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                problem = _read_row(line, number)
                first = line_of.setdefault(normalise_prompt(problem.prompt), number)
                if first != number:
                    raise ValueError(f"the prompt of line {first} again")
                problems.append(problem)
            except ValueError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        more = len(faults) - MAX_REPORTED_ROWS
        raise ValueError(
            f"data file {path} has {len(faults)} bad rows; correct or remove them: "
            + "; ".join(faults[:MAX_REPORTED_ROWS])
            + (f"; and {more} more." if more > 0 else ".")
        )
    if not problems:
        raise ValueError(f"data file {path} holds no problems; it needs at least one row.")
    return tuple(problems)


def split_heldout(problems: tuple[Problem, ...]) -> MathData:
    """Split by each prompt's own text (about one in ten held out), whatever the order of the rows.

    Raises:
        ValueError: when a part would be empty, or a prompt occurs twice.
    """
    train = tuple(p for p in problems if not is_heldout(p.prompt))
    heldout = tuple(p for p in problems if is_heldout(p.prompt))
    if not train or not heldout:
        raise ValueError(
            f"{len(problems)} problems split into {len(train)} train and {len(heldout)} held-out "
            "ones; add problems until both parts have some."
        )
    return MathData(train, heldout)


def _read_row(line: bytes, number: int) -> Problem:
    """Return the row's problem; a ValueError says in a few words what is wrong with it."""
    row = parse_object(line)
    for name in ("prompt", "answer"):
        if name not in row:
            raise ValueError(f"no `{name}`")
    return Problem(f"line-{number}", read_prompt(row["prompt"]), read_answer(row["answer"]))
