"""What a program must do: tests as data, and what of assert statements runs where."""

import ast
import builtins
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("function", "stdio", "asserts")


@dataclass(frozen=True)
class ProgramTests:
    """What a program must do.

    Attributes:
      kind: `function`: calls of a function and what it returns; `stdio`: what the program reads and
        prints; `asserts`: statements that must not raise.
      cases: for `function`, `(args, kwargs, expected)`; for `stdio`, `(input, expected)`; for
        `asserts`, `(statement,)`.
      name: of the function; for `asserts` only needed where it is also a builtin's name.
      setup: for `asserts`, statements to execute before them; they may use the program's classes.
    """

    kind: str
    cases: tuple[tuple, ...]
    name: str = ""
    setup: str = ""


def read_tests(value: Mapping[str, Any] | str) -> ProgramTests:
    """Read `Example.extra["tests"]`: a mapping, or one as JSON.

    `{"kind": "function", "name": "add", "cases": [{"args": [1, 2], "expected": 3}]}`,
    `{"kind": "stdio", "cases": [{"input": "1 2", "expected": "3"}]}` or
    `{"kind": "asserts", "asserts": ["assert add(1, 2) == 3"], "setup": "import math"}`.

    Raises:
      ValueError: when it is not of that form, saying where.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"tests={value!r:.80} is no JSON: {error}") from None
    if not isinstance(value, Mapping) or value.get("kind") not in KINDS:
        raise ValueError(f'tests={value!r:.80}: give "kind", one of {", ".join(KINDS)}')
    kind, name, setup = value["kind"], value.get("name", ""), value.get("setup", "")
    try:
        if kind == "asserts":
            cases = tuple((statement,) for statement in value["asserts"])
            for text in (setup, *value["asserts"]):
                ast.parse(text)
        elif kind == "stdio":
            cases = tuple((str(case["input"]), str(case["expected"])) for case in value["cases"])
        else:
            cases = tuple(
                (list(case["args"]), dict(case.get("kwargs", {})), case["expected"])
                for case in value["cases"]
            )
    except (KeyError, TypeError, SyntaxError, ValueError) as error:
        raise ValueError(f"tests={value!r:.80} of kind {kind!r}: {error!r}") from None
    if not cases or (kind == "function" and not name):
        missing = "one test" if not cases else "the function's name"
        raise ValueError(f"tests={value!r:.80} of kind {kind!r} need at least {missing}")
    return ProgramTests(kind, cases, name, setup)


def split_setup(setup: str, names: Collection[str]) -> tuple[str, str, str]:
    """What comes before any use of the program's names, the rest, and shells of its classes.

    A shell is a class of that name without a body: enough to hold the attributes of objects that
    tests pass to the program, while what the tests' classes know stays with the tests.
    """
    body = ast.parse(setup).body
    uses = [any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(one)) for one in body]
    first = uses.index(True) if True in uses else len(body)
    alone, beside = (
        "".join(ast.unparse(one) + "\n" for one in part) for part in (body[:first], body[first:])
    )
    shells = (f"class {one.name}: pass\n" for one in body if isinstance(one, ast.ClassDef))
    return alone, beside, "".join(shells)


def free_names(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that tests use and do not make: modules of the library, and names of the program."""
    used, made, opened = set(), set(dir(builtins)), set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            opened.add(node.value.id)
    free = used - made
    modules = free & opened & sys.stdlib_module_names
    return sorted(modules), sorted(free - modules)
