"""Tests of programs: the forms that a grader runs, and how data files hold them.

A form is a dictionary of one of three kinds:
`{"kind": "function", "name": ..., "cases": [{"args": [...], "expected": ...}]}` calls a function,
`{"kind": "stdio", "cases": [{"input": ..., "expected": ...}]}` runs a program on each input,
`{"kind": "asserts", "setup": ..., "asserts": ["assert ...", ...]}` runs statements after the
program; `setup` comes after the program and before each of them, as MBPP and HumanEval have it.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

TEST_COLUMNS = {
    "entry_point": "HumanEval",
    "test_list": "MBPP",
    "tests": "programs with tests",
    "input_output": "programs with inputs and outputs",
}


def test_columns(found: set[str]) -> list[str]:
    """Return which of `TEST_COLUMNS` are there; `entry_point` counts beside HumanEval's `test`."""
    return [c for c in TEST_COLUMNS if c in found and (c != "entry_point" or "test" in found)]


def tests_of_row(row: Mapping[str, Any], column: str, prompt: str) -> list[dict[str, Any]]:
    """Return the tests that a row has in one of `TEST_COLUMNS`; `prompt` names its prompt's.

    Raises:
        ValueError: says in a few words what is wrong with them.
    """
    if column not in row:
        raise ValueError(f"no `{column}`")
    if column == "tests":
        return read_tests(row[column])
    if column == "input_output":
        return read_input_output(row[column])
    if column == "test_list":
        parts = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        return [asserts(row[column], "\n".join(map(str, parts)).strip())]
    return humaneval_tests(row.get(prompt), row.get("test"), row[column])


def read_tests(value: Any) -> list[dict[str, Any]]:
    """Return the tests of a `tests` column: forms, a list of assert texts, or JSON of either.

    Raises:
        ValueError: says in a few words what is wrong with them.
    """
    value = _from_json(value, "`tests`")
    forms = [value] if isinstance(value, Mapping) else value
    if not isinstance(forms, Sequence) or not forms:
        raise ValueError("`tests` is neither a list of tests nor JSON of one")
    if all(isinstance(form, str) for form in forms):
        return [asserts(forms)]
    return [_read_form(form) for form in forms]


def read_input_output(value: Any) -> list[dict[str, Any]]:
    """Return the tests of `{"inputs", "outputs"}`, as APPS and verl's code data hold them.

    They are texts for stdin and stdout. Where `fn_name` names a function, an input holds its
    arguments as JSON, one a line, and an output its result as JSON.

    Raises:
        ValueError: says in a few words what is wrong with them.
    """
    value = _from_json(value, "the tests' text")
    inputs, outputs = (
        value.get(key) if isinstance(value, Mapping) else None for key in ("inputs", "outputs")
    )
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("the tests have no lists `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if not value.get("fn_name"):
        cases = [{"input": _text(i), "expected": _text(o)} for i, o in pairs]
        return [{"kind": "stdio", "cases": cases}]
    try:
        cases = [
            {"args": [json.loads(line) for line in i.splitlines()], "expected": json.loads(o)}
            for i, o in pairs
        ]
    except (ValueError, TypeError, AttributeError):
        # Such data come with results wrapped in a list and without: no telling which.
        raise ValueError("`fn_name` with inputs or outputs that are not JSON texts") from None
    return [_read_form({"kind": "function", "name": value["fn_name"], "cases": cases})]


def asserts(statements: Sequence[str], setup: str = "") -> dict[str, Any]:
    """Return the form of assert statements.

    Raises:
        ValueError: when there is none, or one is not text that Python reads.
    """
    if not isinstance(statements, Sequence) or isinstance(statements, str) or not statements:
        raise ValueError("no assert statements")
    if not isinstance(setup, str) or not all(isinstance(s, str) and s.strip() for s in statements):
        raise ValueError("an assert statement, or what comes before, is not text")
    for text in (setup, *statements):
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{text[:60]!r} is no Python: {error}") from None
    return {"kind": "asserts", "setup": setup, "asserts": list(statements)}


def humaneval_tests(prompt: Any, test: Any, entry_point: Any) -> list[dict[str, Any]]:
    """Return the tests of a HumanEval row; `test` defines `check`, which takes the function.

    Helpers that the prompt defines before the function are among the setup: some checks use them.

    Raises:
        ValueError: when `test` defines no `check`, or the entry point is no function's name.
    """
    if not isinstance(test, str) or "def check(" not in test:
        raise ValueError("`test` defines no `check`")
    # A method is named like LeetCode's: Solution().twoSum
    if not isinstance(entry_point, str) or not re.fullmatch(r"(\w+\(\)\.)?\w+", entry_point):
        raise ValueError("`entry_point` is not the name of a function")
    helpers = _helpers(prompt, entry_point) if isinstance(prompt, str) else ""
    return [asserts([f"assert check({entry_point}) is None"], helpers + test)]


def _read_form(form: Any) -> dict[str, Any]:
    kind = form.get("kind") if isinstance(form, Mapping) else None
    if kind == "asserts":
        return asserts(form.get("asserts", ()), form.get("setup") or "")
    cases = form.get("cases") if kind in ("function", "stdio") else None
    if kind not in ("function", "stdio"):
        raise ValueError(f"a test of kind {kind!r}; kinds are function, stdio and asserts")
    if not isinstance(cases, Sequence) or not cases or not all(isinstance(c, dict) for c in cases):
        raise ValueError(f"a {kind} test without `cases`")
    if kind == "stdio":
        if not all(isinstance(c.get(k), str) for c in cases for k in ("input", "expected")):
            raise ValueError("a stdio case without the texts `input` and `expected`")
        return {
            "kind": kind,
            "cases": [{"input": c["input"], "expected": c["expected"]} for c in cases],
        }
    if not isinstance(form.get("name"), str) or not form["name"].isidentifier():
        raise ValueError("a function test without the `name` of a function")
    if not all(isinstance(c.get("args"), list) and "expected" in c for c in cases):
        raise ValueError("a function case without `args` (a list) and `expected`")
    cases = [{"args": c["args"], "expected": c["expected"]} for c in cases]
    return {"kind": kind, "name": form["name"], "cases": cases}


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is not valid JSON") from None


def _text(value: Any) -> str:
    """A text, or a list of its lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("an input or output of the tests is neither text nor a list of lines")
    return "\n".join(lines)


def _helpers(prompt: str, entry_point: str) -> str:
    """What a prompt defines besides the function that it asks for; "" where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in docstrings
            module = ast.parse(prompt)
    except (SyntaxError, ValueError):
        return ""
    others = [part for part in module.body if getattr(part, "name", None) != entry_point]
    return "".join(ast.unparse(part) + "\n" for part in others)
