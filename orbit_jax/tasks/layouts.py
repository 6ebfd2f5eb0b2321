r"""What the columns of a data file mean: rows become `Example`s.

A layout is recognised by the columns that most rows have. The usual ones of question and answer
are understood, verl's and TRL's, and those of GSM8K, MATH, MBPP and HumanEval; what could mean two
things, or nothing known, is refused with the columns that were found.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from orbit_jax.tasks import programs
from orbit_jax.tasks.answers import extract_answer
from orbit_jax.tasks.task import Example

Columns = Mapping[str, Any]

PROMPTS = ("prompt", "question", "problem", "instruction", "messages")
ANSWERS = ("answer", "ground_truth", "solution")
UNDERSTOOD = (
    f"a prompt ({', '.join(PROMPTS)}: text, or messages) with an answer ({', '.join(ANSWERS)}); "
    "verl's prompt and reward_model.ground_truth; HumanEval's prompt, test and entry_point; "
    "MBPP's text or prompt and test_list; a prompt with tests, or with input_output"
)
# Without these a prompt is only half of what is asked.
_PARTS_OF_PROMPTS = ("choices", "options", "context", "passage", "image", "images", "video")
_SOURCES = ("data_source", "source", "dataset")
_DIFFICULTIES = ("difficulty", "level")


@dataclass(frozen=True)
class Layout:
    """How rows are read: `read(columns, id)` gives the example, or a ValueError in a few words."""

    name: str
    read: Callable[[Columns, str], Example]


def recognise(rows: Sequence[Columns], columns: Mapping[str, str], task: str, place: str) -> Layout:
    """Return the layout of rows.

    Args:
        rows: all of them, each with the columns in which it has something.
        columns: the columns of `prompt` and `answer` where they are not to be guessed; an answer
            of "" is none.
        task: of examples that are not programs.
        place: where the rows are, for messages.

    Raises:
        ValueError: when the columns mean nothing known or several things, with what was found.
    """
    if unknown := set(columns) - {"prompt", "answer"}:
        raise ValueError(f"columns: {sorted(unknown)[0]!r} is neither prompt nor answer.")
    counts = Counter(name for row in rows for name in row)
    found = {name for name, count in counts.items() if 2 * count > len(rows)}
    refuse = functools.partial(_refusal, place, sorted(found))
    for name in filter(None, columns.values()):
        if name not in counts:
            raise refuse(f"column {name!r}, which `columns` names, is in no row")
    if "answer" not in columns and (tests := programs.test_columns(found)):
        if len(tests) > 1:
            raise refuse(f"{' and '.join(tests)} could each be the tests of a program")
        prompts = (*PROMPTS, "text") if tests == ["test_list"] else PROMPTS
        prompt = _column("prompt", prompts, found, columns, refuse)
        return Layout(programs.TEST_COLUMNS[tests[0]], _program_reader(prompt, tests[0]))
    prompt = _column("prompt", PROMPTS, found, columns, refuse)
    if "prompt" not in columns and (parts := sorted(found & set(_PARTS_OF_PROMPTS))):
        raise refuse(f"column {parts[0]!r} would be left out of the prompt; write it into it")
    if "answer" not in columns and "reward_model" in found:
        return Layout("verl", _verl_reader(prompt, task))
    answer = _column("answer", ANSWERS, found, columns, refuse)
    name, read = "question and answer", _read_plain
    if answer == "solution":
        name, read = ("MATH", _read_boxed) if prompt == "problem" else (name, _read_solution)
    elif answer == "answer" and _most(rows, lambda row: "####" in str(row.get("answer"))):
        name, read = "GSM8K", _read_after_hashes
    return Layout(name, _answer_reader(prompt, answer, read, task))


def read_prompt(value: object, name: str = "prompt") -> str | tuple[dict[str, str], ...]:
    """Return a prompt: text, or the chat messages with `role` and `content` alone.

    Raises:
        ValueError: when it is neither, or some of it is empty.
    """
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{name}` is neither text nor a list of chat messages")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) and message[key].strip()
            for key in ("role", "content")
        ):
            raise ValueError(f"`{name}` has a message without `role` and `content` texts")
    if isinstance(value, str):
        return value
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def read_answer(value: object, name: str = "answer") -> str:
    """Return an answer, text or a number, as text.

    Raises:
        ValueError: when it is neither, or empty.
    """
    number = isinstance(value, int | Decimal | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (number and math.isfinite(value)):
        raise ValueError(f"`{name}` is neither text nor a number")
    if not str(value).strip():
        raise ValueError(f"`{name}` is empty")
    return str(value)


def _refusal(place: str, found: Sequence[str], reason: str) -> ValueError:
    return ValueError(
        f"data {place}: {reason}; the columns are {', '.join(found) or 'none'}. Understood are "
        f"{UNDERSTOOD}. Rename columns, or name the two in "
        "columns={'prompt': ..., 'answer': ...}."
    )


def _column(
    role: str,
    names: Sequence[str],
    found: set[str],
    columns: Mapping[str, str],
    refuse: Callable[[str], ValueError],
) -> str:
    """The one of `names` that is the prompt, or the answer."""
    if role in columns:
        return columns[role]
    known = [name for name in names if name in found]
    if role == "answer" and len(known) > 1 and "solution" in known:
        known.remove("solution")  # beside an answer it is the way there
    if not known:
        raise refuse(f"no column that is the {role}")
    if len(known) > 1:
        raise refuse(f"{' and '.join(known)} could each be the {role}")
    return known[0]


def _most(rows: Sequence[Columns], holds: Callable[[Columns], bool]) -> bool:
    return 2 * sum(map(holds, rows)) > len(rows)


def _example(
    row: Columns,
    row_id: str,
    prompt: str,
    answer: str,
    task: str,
    used: Sequence[str],
    **extra: Any,
) -> Example:
    """The example with all columns of which nothing was made in `extra`."""
    source = next((name for name in _SOURCES if isinstance(row.get(name), str)), "")
    difficulty = next((n for n in _DIFFICULTIES if isinstance(row.get(n), str | int)), "")
    used = {prompt, source, difficulty, *used}
    text = read_prompt(_require(row, prompt), prompt)
    if not isinstance(text, str) and text[-1]["role"] == "assistant":
        raise ValueError(f"the last message of `{prompt}` is the assistant's")
    if prompt == "instruction" and isinstance(text, str) and row.get("input"):
        used.add("input")
        text = f"{text}\n\n{read_prompt(row['input'], 'input')}"
    return Example(
        id=row_id,
        prompt=text,
        answer=answer,
        task=task,
        difficulty=str(row.get(difficulty, "")),
        source=row.get(source, ""),
        extra={k: _plain(v) for k, v in row.items() if k not in used} | extra,
    )


def _require(row: Columns, name: str) -> Any:
    if name not in row:
        raise ValueError(f"no `{name}`")
    return row[name]


def _plain(value: Any) -> Any:
    """A value as JSON would hold it."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Decimal):
        return float(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _answer_reader(
    prompt: str, answer: str, read: Callable[[Columns, str], str], task: str
) -> Callable[[Columns, str], Example]:
    def reader(row: Columns, row_id: str) -> Example:
        if not answer:
            return _example(row, row_id, prompt, "", task, ())
        text = read(row, answer)
        full = str(row[answer])
        kept = {} if text == full or "solution" in row else {"solution": full}
        used = () if answer == "solution" and text != full else (answer,)
        return _example(row, row_id, prompt, text, task, used, **kept)

    return reader


def _read_plain(row: Columns, name: str) -> str:
    return read_answer(_require(row, name), name)


def _read_after_hashes(row: Columns, name: str) -> str:
    _, hashes, answer = _read_plain(row, name).rpartition("####")
    if not hashes or not answer.strip():
        raise ValueError(f"`{name}` has no `#### answer` at its end, as GSM8K's have")
    return answer.strip()


def _read_boxed(row: Columns, name: str) -> str:
    r"""The last box of a worked solution; older spellings are `\fbox{2}` and `\boxed 2`."""
    text = re.sub(r"\\fbox\s*\{", r"\\boxed{", _read_plain(row, name))
    text = re.sub(r"\\boxed\s+(\w+)", r"\\boxed{\1}", text)
    answer = extract_answer(text) if re.search(r"\\boxed\s*\{", text) else None
    if not answer:
        raise ValueError(rf"`{name}` has no `\boxed{{...}}` at its end, as MATH's have")
    return answer


def _read_solution(row: Columns, name: str) -> str:
    boxed = re.search(r"\\f?box(?:ed)?\b", str(row.get(name)))
    return _read_boxed(row, name) if boxed else _read_plain(row, name)


def _verl_reader(prompt: str, task: str) -> Callable[[Columns, str], Example]:
    def reader(row: Columns, row_id: str) -> Example:
        model = _require(row, "reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        if truth is None:
            raise ValueError("no `reward_model.ground_truth`")
        if isinstance(truth, Mapping) or re.match(r'\s*\{.*"inputs"', str(truth), re.DOTALL):
            tests = programs.read_input_output(_plain(truth))
            return _example(row, row_id, prompt, "", "code", ("reward_model",), tests=tests)
        answer = read_answer(truth, "reward_model.ground_truth")
        return _example(row, row_id, prompt, answer, task, ("reward_model",))

    return reader


def _program_reader(prompt: str, column: str) -> Callable[[Columns, str], Example]:
    def reader(row: Columns, row_id: str) -> Example:
        tests = programs.tests_of_row(_plain(row), column, prompt)
        continued = column == "entry_point" and isinstance(row.get(prompt), str)
        kept = {"starter_code": row[prompt]} if continued else {}
        used = ("test",) if column == "entry_point" else (column,)
        example = _example(row, row_id, prompt, "", "code", used, tests=tests, **kept)
        if column != "test_list" or not isinstance(example.prompt, str):
            return example
        # MBPP's texts do not name the function. One test does; the others stay unseen.
        first = tests[0]["asserts"][0]
        return replace(
            example, prompt=f"{example.prompt}\n\nThe program must pass this test:\n{first}"
        )

    return reader
