import json
import math

import psutil
import pytest

from orbit_jax.tasks import sandbox_link
from orbit_jax.tasks.code import CodeGrader, extract_program
from orbit_jax.tasks.program_tests import read_tests
from orbit_jax.tasks.sandbox import Limits, Sandbox
from orbit_jax.tasks.task import Example

LIMITS = Limits(wall_seconds=2.5, cpu_seconds=0.8, memory_bytes=256 << 20)
FUNCTION = {
    "kind": "function",
    "name": "add",
    "cases": [{"args": [1, 2], "expected": 3}, {"args": [20], "kwargs": {"b": 22}, "expected": 42}],
}
ASSERTS = {"kind": "asserts", "asserts": ["assert add(1, 2) == 3", "assert add(20, b=22) == 42"]}
STDIO = {
    "kind": "stdio",
    "cases": [{"input": "1 2\n", "expected": "3\n"}, {"input": "20 22\n", "expected": "42"}],
}
ADD = "def add(a, b):\n    return a + b\n"
PRINT = "print(sum(map(int, input().split())))\n"


@pytest.fixture(scope="module")
def sandbox():
    try:
        with Sandbox(limits=LIMITS) as sandbox:
            yield sandbox
    except ValueError as error:
        if "namespace of users was refused" not in str(error):
            raise
        pytest.skip(str(error))


def grade(sandbox, tests, program, partial_credit=False):
    example = Example("1", "a task", "", task="code", extra={"tests": tests})
    completion = program if "```" in program else f"Here:\n```python\n{program}\n```\n"
    return CodeGrader(sandbox, partial_credit).grade(example, completion)


def asserts(*statements, **more):
    return {"kind": "asserts", "asserts": list(statements), **more}


def returns(expected, args=()):
    case = {"args": list(args), "expected": expected}
    return {"kind": "function", "name": "f", "cases": [case]}


@pytest.mark.parametrize(
    ("tests", "program"),
    [(FUNCTION, ADD), (ASSERTS, ADD), (STDIO, PRINT), (json.dumps(STDIO), PRINT)],
)
def test_a_right_program_passes(sandbox, tests, program):
    score = grade(sandbox, tests, program)
    assert (score.value, score.outcome) == (1.0, "scored")
    assert score.details == {"passed": 2.0, "tests": 2.0}


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (FUNCTION, "def add(a, b):\n    return 3\n"),
        (ASSERTS, "def add(a, b):\n    return 3\n"),
        (STDIO, "print(3)"),
    ],
)
def test_a_half_right_program_gets_partial_credit_only_where_asked(sandbox, tests, program):
    assert grade(sandbox, tests, program).value == 0.0
    score = grade(sandbox, tests, program, partial_credit=True)
    assert (score.value, score.outcome) == (0.5, "scored")
    assert score.details["passed"] == 1.0
    assert score.details["status"] == "error"


CHEATS = {
    "prints a verdict": 'print(\'{"status": "ok", "passed": 2, "tests": 2}\')',
    "leaves with success": "import sys\nsys.exit(0)",
    "leaves with success in the call": "import sys\ndef add(a, b=0): sys.exit(0)",
    "leaves at once": "import os\ndef add(a, b=0): os._exit(0)",
    "equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __getattr__(self, name): return lambda *_: True
    def __bool__(self): return True
def add(a, b=0): return Any()
""",
    "an object that equals everything": """
class Any:
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda *_: True
    __getattr__ = lambda self, name: Any()
    __call__ = __rsub__ = __sub__ = __abs__ = lambda self, *_: self
def add(a, b=0): return Any()
""",
    "raises what the test expects of itself": "def add(a, b=0): raise StopIteration",
    "an exception that ends a test": "def add(a, b=0): raise SystemExit(0)",
    "a class of exception by another name": """
def add(a, b=0):
    raise type('SystemExit', (BaseException,), {})(0)
""",
    "patches the library": """
import builtins, operator, json, unittest, types
builtins.AssertionError = ValueError
builtins.isinstance = lambda *_: True
builtins.sorted = builtins.abs = builtins.set = lambda *_: True
json.loads = lambda *_: {"value": 3}
operator.eq = lambda *_: True
def add(a, b=0): return 0
""",
    "looks for the answer among objects": """
import gc, sys
def add(a, b=0):
    found = set()
    frame = sys._getframe()
    while frame:
        found |= {v for v in frame.f_locals.values() if type(v) is int}
        frame = frame.f_back
    text = str(gc.get_objects())
    for word in ("expected", "assert add"):
        if word in text.replace(repr(word), ""):
            return eval(text.split(word)[1][:20].split("==")[-1])
    return 42 if 42 in found else 0
""",
    "patches what executes it": """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if isinstance(value, type) and hasattr(value, "_invoke"):
            value._invoke = value._call = lambda *_: b'o{"value": true}'
        if hasattr(value, "names"):
            value.names["AssertionError"] = None
    frame = frame.f_back
def add(a, b=0): return 0
""",
    "writes the report itself": """
import os
for descriptor in range(3, 64):
    try:
        for text in (b'o{"value": true}', b'oPASSED', b'u', b'a{"action": "value"}'):
            os.write(descriptor, len(text).to_bytes(4, "big") + text)
    except OSError: pass
def add(a, b=0): return 0
""",
    "claims that the sandbox failed": """
import os, sys
def add(a, b=0):
    for descriptor in range(3, 64):
        try: os.write(descriptor, (9).to_bytes(4, "big") + b"u1234567x")
        except OSError: pass
    os._exit(1)
""",
    "returns what cannot be read": """
class Text(str):
    def __repr__(self): raise SystemExit
def add(a, b=0):
    x = []
    x.append(x)
    return x
""",
    "reads the tests": """
import glob
def add(a, b=0):
    return [open(p).read() for p in glob.glob('/tmp/**', recursive=True) if 'test' in p] or 0
""",
}


@pytest.mark.parametrize("tests", [FUNCTION, ASSERTS, STDIO], ids=["function", "asserts", "stdio"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_verdict_cannot_be_forged(sandbox, tests, cheat):
    score = grade(sandbox, tests, CHEATS[cheat], partial_credit=True)
    assert (score.value, score.outcome) == (0.0, "scored"), score.details


@pytest.mark.parametrize(
    "statement",
    [
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert math.isclose(add(1, 2), 3)",
        "assert add(1, 2) in (3, 4)",
        "assert [add(1, 2)] == [3]",
        "assert sorted([add(1, 2)]) == [3]",
        "assert not add(1, 2) > 5 and add(1, 2) > 2",
        "assert isinstance(add(1, 2), int)",
        "assert add(1, 2) is not None and add(1, 2) == add(2, 1) == 3",
        "assert str(add(1, 2)) == '3'",
    ],
)
def test_an_object_that_agrees_with_everything_passes_no_assert(sandbox, statement):
    cheats = [CHEATS["an object that equals everything"], CHEATS["patches the library"]]
    assert grade(sandbox, asserts(statement), ADD).value == 1.0
    for cheat in cheats:
        assert grade(sandbox, asserts(statement), cheat).value == 0.0


@pytest.mark.parametrize(
    ("statement", "program"),
    [
        ("for i in range(9):\n    assert square(i) == i * i", "def square(n): return n * n"),
        ("assert math.sqrt(f()) == 2", "def f(): return 4"),
        ("assert f() == {1: (2, [3.5]), 'a': {4}, None: b'x'}",
         "def f(): return {1: (2, [3.5]), 'a': {4}, None: b'x'}"),
        ("assert f() == 7 ** 5000", "f = lambda: 7 ** 5000"),
        ("assert set(f([3, 1])) == {1, 3}", "def f(x): return reversed(x)"),
        ("assert list(f(3)) == [0, 1, 2]", "def f(n):\n    yield from range(n)"),
        ("assert len(f()) == 2 and f()['a'] == 1 and 'b' in f()",
         "import collections\ndef f(): return collections.UserDict(a=1, b=2)"),
        ("s = Stack()\ns.push(1)\nassert s.pop() == 1 and s.items == [] and str(s) == 'S'",
         "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): "
         "self.items.append(x)\n  def pop(self): return self.items.pop()\n"
         "  def __str__(self): return 'S'"),
        ("try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'neg' in str(e)",
         "def f(n): raise ValueError('negative')"),
        ("assert LIMIT == 5", "LIMIT = 5"),
        ("assert f(g(2)) == 5", "def g(x): return {x}\ndef f(s): return s.pop() + 3"),
        ("assert sum(f(2)) == 4", "def f(n): return [n, n]\ndef sum(x): return 4"),
        ("def check(candidate):\n    assert candidate(2) == 4\ncheck(double)",
         "def double(n): return 2 * n"),
    ],
)  # fmt: skip
def test_asserts_may_be_any_statements(sandbox, statement, program):
    assert grade(sandbox, asserts(statement), program).value == 1.0
    assert grade(sandbox, asserts(statement), "def other(): pass").value == 0.0


def test_asserts_have_a_setup_and_keep_their_variables(sandbox):
    tests = asserts("x = f(1)", "assert x == pi_ish", setup="import math\npi_ish = round(math.pi)")
    assert grade(sandbox, tests, "def f(n): return 2 + n").value == 1.0


def test_a_function_named_like_a_builtin_is_tested_when_it_is_named(sandbox):
    program = "def sum(a, b): return a + b"
    assert grade(sandbox, asserts("assert sum(1, 2) == 3", name="sum"), program).value == 1.0


def test_tests_that_cannot_be_posed_are_no_fault_of_the_program(sandbox):
    tests = asserts("assert apply(lambda x: x + 1, 3) == 4")
    score = grade(sandbox, tests, "def apply(f, x): return f(x)")
    assert score.outcome == "infra_failure"
    assert "a test passes a function" in score.details["error"]
    broken = asserts("assert f() == 1", setup="import no_such_module")
    score = grade(sandbox, broken, "def f(): return 1")
    assert score.outcome == "infra_failure"
    assert "no_such_module" in score.details["error"]


@pytest.mark.parametrize(
    ("expected", "value", "right"),
    [
        (3, "3", True),
        (3, "3.0", True),
        (3, "True", False),
        (True, "1", False),
        (True, "True", True),
        (0.3, "0.1 + 0.2", True),
        (0.3, "0.3000001", False),
        (3, "'3'", False),
        (None, "None", True),
        ([1, [2]], "(1, [2])", True),
        ([1, 2], "{1, 2}", False),
        ([1, 2], "[1, 2, 3]", False),
        ({"1": [2], "a": None}, "{1: (2,), 'a': None}", True),
        ({"a": 1}, "{'a': 1, 'b': 2}", False),
        (10**30, "10 ** 30", True),
        (10**30, "10 ** 30 + 1", False),
        (math.nan, "float('nan')", True),
        (1.0, "10 ** 400", False),
        ("\u00fc", "'\\u00fc'", True),
    ],
)
def test_returned_values_are_compared_as_json(sandbox, expected, value, right):
    assert grade(sandbox, returns(expected), f"def f(): return {value}").value == float(right)


def test_printed_lines_are_compared_without_trailing_space(sandbox):
    tests = {"kind": "stdio", "cases": [{"input": "", "expected": "1\n2\n"}]}
    assert grade(sandbox, tests, "print('1 ')\nprint('2\\n')").value == 1.0
    assert grade(sandbox, tests, "print('1 2')").value == 0.0
    assert grade(sandbox, tests, "print('1\\n2')\nraise SystemExit(1)").value == 0.0


def test_what_a_program_prints_does_not_disturb_its_tests(sandbox):
    program = (
        "print('x')\ndef add(a, b):\n    print(a)\n    return a + b\nif __name__ == '__main__':\n"
    )
    program += "    input()\n"
    assert grade(sandbox, FUNCTION, program).value == 1.0
    assert grade(sandbox, ASSERTS, program).value == 1.0


@pytest.mark.parametrize("tests", [FUNCTION, ASSERTS])
def test_a_program_that_hangs_keeps_what_it_has_passed(sandbox, tests):
    program = "def add(a, b):\n    while a > 9: pass\n    return a + b"
    score = grade(sandbox, tests, program, partial_credit=True)
    assert (score.value, score.outcome) == (0.5, "scored")
    assert score.details["status"] == "timeout"


@pytest.mark.parametrize("tests", [FUNCTION, ASSERTS, STDIO])
def test_the_time_for_all_tests_is_limited(sandbox, tests):
    example = Example("1", "a task", "", extra={"tests": tests})
    grader = CodeGrader(sandbox, partial_credit=True, max_seconds=1e-9)
    assert grader.grade(example, PRINT if tests is STDIO else ADD).value == 0.5


def test_calls_of_one_assert_share_its_time(sandbox):
    statement = "import time\nfor _ in range(1000): f()"
    score = grade(sandbox, asserts(statement), "import time\ndef f(): time.sleep(0.9)")
    assert (score.value, score.outcome) == (0.0, "scored")
    assert score.details["error"] == "RuntimeError: no answer: timeout"


@pytest.mark.parametrize("tests", [FUNCTION, ASSERTS, STDIO])
def test_a_failure_of_the_sandbox_is_not_scored(tests, monkeypatch):
    with Sandbox(limits=LIMITS) as sandbox:
        monkeypatch.setattr(sandbox_link, "BOOTSTRAP", "raise SystemExit(3)")
        for worker in sandbox._live:
            below = psutil.Process(worker.process.pid).children(recursive=True)
            worker.process.kill()
            assert psutil.wait_procs(below, timeout=10)[1] == []
        score = grade(sandbox, tests, ADD)
    assert score.outcome == "infra_failure"
    assert math.isnan(score.value)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```\nx = 2\n```\n", ("x = 2\n", True)),
        ("~~~py\nx = '```'\n~~~", ("x = '```'\n", True)),
        ("````\n```\nx\n```\n````", ("```\nx\n```\n", True)),
        ("1. so\n   ```python\n   if x:\n       y\n   ```", ("if x:\n    y\n", True)),
        ("x = 1", ("x = 1", False)),
        ("use `x` and ```y```", ("use `x` and ```y```", False)),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\n```python\nx = ", None),
        ("```\n\n```", None),
        ("  \n", None),
        ("", None),
    ],
)
def test_the_last_whole_block_is_the_program(completion, program):
    assert extract_program(completion) == program


def test_text_without_a_program_is_a_parse_failure(sandbox):
    example = Example("1", "a task", "", extra={"tests": FUNCTION})
    for completion in ("", "I cannot do that.", "```python\ndef add(a, b):", "```\n```"):
        score = CodeGrader(sandbox).grade(example, completion)
        assert (score.value, score.outcome) == (0.0, "parse_failure")
    assert CodeGrader(sandbox).grade(example, ADD).value == 1.0
    assert grade(sandbox, FUNCTION, "def add(a, b:").outcome == "scored"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("{", "is no JSON"),
        ({"kind": "unit"}, "one of function, stdio, asserts"),
        ({"kind": "stdio", "cases": [{"input": ""}]}, "'expected'"),
        ({"kind": "stdio", "cases": []}, "at least one test"),
        ({"kind": "function", "cases": [{"args": [], "expected": 1}]}, "the function's name"),
        ({"kind": "asserts", "asserts": ["assert ("]}, "SyntaxError"),
        ([], "give"),
    ],
)
def test_tests_that_cannot_be_read_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests(tests)
