"""Grading programs: the last fenced block of a completion, executed against tests in the sandbox.

The verdict is never the program's. What is expected stays outside its sandbox: outputs and returned
values come out as text and plain values, and are compared here; assert statements run in a second
sandbox, in which names of the program stand for calls to it. So printing a verdict, leaving by
`sys.exit`, an `__eq__` that always agrees or a patched library change nothing but the program's own
answers. Objects of its classes equal nothing but themselves, so tests compare plain values; what a
program does to its arguments stays with it; a test that passes it the right answer gives it away.
Objects of classes that the tests define are passed to it as copies of their attributes, without the
classes' methods.
"""

import json
import math
import threading
from dataclasses import replace
from typing import Any

from orbit_jax.tasks.program_tests import ProgramTests, free_names, read_tests, split_setup
from orbit_jax.tasks.sandbox import Outcome, Sandbox
from orbit_jax.tasks.task import Example, Score

FLOAT_RELATIVE_TOLERANCE = 1e-9  # between floats, of which the last bits are not the task's

# Hostile text can take a compiler's memory, so this is not done here. The text is not executed.
_FIRST_THAT_COMPILES = """
import json, warnings
warnings.simplefilter("ignore")
for i, text in enumerate(json.loads(input())):
    try:
        compile(text, "program", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        continue
    print(i)
    break
"""


def extract_program(completion: str) -> tuple[str, bool] | None:
    """The last fenced block, or the whole text when there is none, and whether it was fenced.

    None when that is empty, or when the last block does not end: it was cut off.
    """
    blocks: list[list[str]] = []
    fence = indent = ""  # of the block under way
    for line in completion.splitlines():
        text = line.strip()
        mark = text[: len(text) - len(text.lstrip("`~"))]
        if fence:
            if text == mark and mark.startswith(fence):
                fence = ""
            else:
                blocks[-1].append(line.removeprefix(indent))
        elif len(mark) >= 3 and len(set(mark)) == 1 and "`" not in text[len(mark) :]:
            fence, indent = mark, line[: len(line) - len(line.lstrip())]
            blocks.append([])
    program = "\n".join(blocks[-1]) + "\n" if blocks else completion
    return None if fence or not program.strip() else (program, bool(blocks))


class CodeGrader:
    """Grades completions from any thread.

    Args:
      sandbox: where programs run; its limits are those of one program, call or assert.
      partial_credit: whether the value is the share of tests passed, instead of 1 for all, else 0.
        Once a program has passed a limit, the tests that are left are not passed.
      max_seconds: of execution, for all tests of one completion; those left are not passed.
    """

    def __init__(
        self, sandbox: Sandbox, partial_credit: bool = False, max_seconds: float = 60.0
    ) -> None:
        self.sandbox, self.partial_credit = sandbox, partial_credit
        self.max_seconds = max_seconds
        self._turns = threading.Semaphore(sandbox.workers)  # each turn keeps up to two processes

    def grade(self, example: Example, completion: str) -> Score:
        """Return the score of one completion.

        `extra["tests"]` is what `read_tests` reads, or a list of such. The program goes behind
        `extra["starter_code"]`, if any, where the two are a program together (it may be whole, or
        the body that the code lacks), else it goes alone. Details say how many of how many tests
        passed, and the status and last words of the first that did not.

        Raises:
          ValueError: when the example's tests cannot be read.
        """
        given = example.extra["tests"]
        forms = [read_tests(one) for one in (given if isinstance(given, list) else [given])]
        program = self._program(completion, example.extra.get("starter_code"))
        if program is None:
            return Score(0.0, "parse_failure", {"error": "no program"})
        run = {"function": self._functions, "stdio": self._stdio, "asserts": self._asserts}
        outcomes: list[Outcome] = []
        with self._turns:
            for tests in forms:
                outcomes += run[tests.kind](program, tests)
                if self._decided(outcomes[-1], sum(outcome.seconds for outcome in outcomes)):
                    break
        total = sum(len(tests.cases) for tests in forms)
        passed = sum(outcome.status == "ok" for outcome in outcomes)
        failed = next((outcome for outcome in outcomes if outcome.status != "ok"), None)
        details = {"passed": float(passed), "tests": float(total)}
        if failed:
            last_words = failed.stderr.strip().rpartition("\n")[2]
            details |= {"status": failed.status, "error": last_words[:200]}
        if any(outcome.status == "infra_failure" for outcome in outcomes):
            return Score(math.nan, "infra_failure", details)
        share = passed / total
        return Score(share if self.partial_credit else float(share == 1.0), "scored", details)

    def _program(self, completion: str, starter: str | None) -> str | None:
        found = extract_program(completion)
        if found is None:
            return None
        text, fenced = found
        if fenced and not starter:
            return text
        texts = [f"{starter}{text}", f"{starter}\n{text}", text] if starter else [text]
        outcome = self.sandbox.run(_FIRST_THAT_COMPILES, stdin=json.dumps(texts))
        if outcome.status == "infra_failure":  # the tests will meet it too
            return texts[0]
        first = outcome.stdout.strip()
        return texts[int(first)] if first else (texts[-1] if fenced else None)

    def _stdio(self, program: str, tests: ProgramTests) -> list[Outcome]:
        outcomes = []
        for given, expected in tests.cases:
            outcome = self.sandbox.run(program, stdin=given)
            if outcome.status == "ok" and _lines(outcome.stdout) != _lines(expected):
                outcome = _wrong(outcome, f"wrong output {outcome.stdout[:80]!r}")
            outcomes.append(outcome)
            if self._decided(outcome, sum(outcome.seconds for outcome in outcomes)):
                break
        return outcomes

    def _functions(self, program: str, tests: ProgramTests) -> list[Outcome]:
        with self.sandbox.session() as session:
            outcomes = [session.call(program, name="program")]
            if outcomes[0].status != "ok":
                return outcomes
            outcomes.clear()
            for args, kwargs, expected in tests.cases:
                outcome = session.invoke(tests.name, args, kwargs)
                if outcome.status == "ok" and not _replied(outcome.reply, expected):
                    outcome = _wrong(outcome, f"wrong reply {outcome.reply[:80]}")
                outcomes.append(outcome)
                if session.ended or self._decided(outcome, session.seconds):
                    break
        return outcomes

    def _asserts(self, program: str, tests: ProgramTests) -> list[Outcome]:
        statements = [statement for (statement,) in tests.cases]
        modules, stand_ins = free_names([tests.setup, *statements])
        if tests.name:
            stand_ins = sorted({*stand_ins, tests.name})
        imports = "".join(f"import {module}\n" for module in modules)
        alone, beside, shells = split_setup(tests.setup, stand_ins)
        with self.sandbox.session() as session, self.sandbox.session() as checks:
            outcomes = [session.call(program, name="program")]
            if outcomes[0].status != "ok":
                return outcomes
            prepared = checks.call(imports + alone)
            if prepared.status != "ok":  # without a word from the program: the tests are broken
                return [Outcome("infra_failure", stderr=prepared.stderr)]
            if shells:  # so that objects of the tests' classes can be passed to the program
                session.call(shells, name="program")
            if beside:
                prepared = checks.call(beside, stand_ins=stand_ins, program=session)
                if prepared.status != "ok":
                    return [session.ended or prepared]
            outcomes.clear()
            for statement in statements:
                outcome = checks.call(statement, stand_ins=stand_ins, program=session)
                if session.ended and session.ended.status != "ok":
                    outcome = session.ended
                outcomes.append(outcome)
                seconds = session.seconds + checks.seconds
                if session.ended or checks.ended or self._decided(outcome, seconds):
                    break
        return outcomes

    def _decided(self, outcome: Outcome, seconds: float) -> bool:
        failed = outcome.status != "ok" and not self.partial_credit
        return failed or seconds > self.max_seconds


def _wrong(outcome: Outcome, why: str) -> Outcome:
    return replace(outcome, status="error", stderr=why)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _replied(reply: str, expected: Any) -> bool:
    """Whether a function returned what JSON says it should; the reply is untrusted text."""
    try:
        return _matches(json.loads(reply)["value"], expected)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False  # it raised, or it is nothing that `encode` gives


def _matches(value: Any, expected: Any) -> bool:
    """Compare as JSON would: a tuple is a list, and a key that is an integer is text."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "dict":
            pairs = {str(key) if type(key) is int else key: item for key, item in content}
            return (
                isinstance(expected, dict)
                and pairs.keys() == expected.keys()
                and all(_matches(pairs[key], expected[key]) for key in expected)
            )
        if kind not in ("tuple", "int"):
            return False
        value = content if kind == "tuple" else int(content, 16)
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_matches, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        numbers = (value, expected)
        if any(isinstance(number, bool) for number in numbers):
            return False
        return all(map(math.isnan, numbers)) or math.isclose(
            *numbers, rel_tol=FLOAT_RELATIVE_TOLERANCE
        )
    return type(value) is type(expected) and value == expected
