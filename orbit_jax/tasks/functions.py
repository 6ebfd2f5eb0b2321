"""Small program synthesis: a function of one number is to be written from its first three values.

`f(0)=57;f(1)=63;f(2)=69` asks for `def f(x):return 6*x+57`. Functions are linear or quadratic, and
a program is right if it agrees at other places. A split depends on the prompt's text alone.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from orbit_jax.tasks.code import CodeGrader
from orbit_jax.tasks.problems import is_heldout
from orbit_jax.tasks.sandbox import Sandbox
from orbit_jax.tasks.task import Example, Score, Tool, Transcript, posed

KINDS = {"linear": "{a}*x+{b}", "quadratic": "{a}*x*x+{b}"}
FACTORS, SUMMANDS = range(2, 10), range(1, 100)
_ASKED, _TESTED = (0, 1, 2), (3, 5, 10, 17)


def function_examples(split: str) -> tuple[Example, ...]:
    """All functions of `train` or `heldout`, in an order without meaning."""
    every = list(itertools.product(KINDS, FACTORS, SUMMANDS))
    random.Random(0).shuffle(every)
    found = (_pose(*one) for one in every)
    return tuple(one for one in found if is_heldout(one.prompt) == (split == "heldout"))


def function_stream(seed: int) -> Iterator[Example]:
    """Train-side examples without end."""
    examples, rng = function_examples("train"), random.Random(seed)
    while True:
        yield rng.choice(examples)


def program(example: Example) -> str:
    """A right program."""
    return f"def f(x):return {example.extra['expression']}"


def lazy_program(example: Example) -> str:
    """One that agrees with the first value alone."""
    return f"def f(x):return x+{example.extra['summand']}"


def _pose(kind: str, a: int, b: int) -> Example:
    expression = KINDS[kind].format(a=a, b=b)
    power = 1 if kind == "linear" else 2
    values = {x: a * x**power + b for x in (*_ASKED, *_TESTED)}
    return Example(
        id=f"{kind}-{a}-{b}",
        prompt=";".join(f"f({x})={values[x]}" for x in _ASKED),
        answer="",
        task="functions",
        difficulty=kind,
        extra={
            "expression": expression,
            "summand": b,
            "tests": {
                "kind": "function",
                "name": "f",
                "cases": [{"args": [x], "expected": values[x]} for x in _TESTED],
            },
        },
    )


class Functions:
    """The task `functions`: completions are executed, in the sandbox, at places of their own."""

    name = "functions"
    tools: tuple[Tool, ...] = ()

    def __init__(self, sandbox: Sandbox, partial_credit: bool = False):
        self._grader = CodeGrader(sandbox, partial_credit)

    def examples(self, split: str) -> Sequence[Example]:
        """Those of `train` and `heldout`."""
        return function_examples(split) if split in ("train", "heldout") else ()

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The values alone."""
        return posed(example)

    def grade(self, example: Example, transcript: Transcript) -> Score:
        """1 for a program that agrees at all tested places; with partial credit their share."""
        return self._grader.grade(example, transcript[-1].text)
