"""The tool `python`: what a model is told, and that one rollout knows nothing of another."""

import os

import pytest

from orbit_jax.tasks.call_readers import ToolCall
from orbit_jax.tasks.python_tool import PythonTool
from orbit_jax.tasks.sandbox import Limits, Sandbox
from orbit_jax.tasks.tools import RolloutTools, run_tools

LIMITS = Limits(
    wall_seconds=10, cpu_seconds=0.8, memory_bytes=256 << 20, processes=16, output_bytes=64 << 10
)
ANEW = "; all variables are lost, the next call starts anew"


@pytest.fixture(scope="module")
def sandbox():
    try:
        with Sandbox(workers=2, limits=LIMITS) as sandbox:
            yield sandbox
    except ValueError as error:
        if "namespace of users was refused" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def python(sandbox):
    session = PythonTool(sandbox, max_characters=300).start()
    yield lambda code: session.call({"code": code})
    session.close()


def test_what_is_printed_and_a_last_value_come_back(python):
    assert python("print('a')\nx = 6\nx * 7") == "a\n42"
    assert python("import sys\nprint('told', file=sys.stderr)") == "told"
    assert python("x = 1") == python("") == "no output"


def test_a_rollout_keeps_its_variables_and_no_other_sees_them(sandbox):
    tool = PythonTool(sandbox)
    rollouts = [RolloutTools([tool]) for _ in range(2)]

    def turn(*codes):
        calls = [(ToolCall("python", {"code": code}),) for code in codes]
        results, counts = run_tools(calls, rollouts, 60.0, 2)
        return [result.text for (result,) in results], counts

    assert turn("x = 20\ndef f(n): return n + x", "x = 1")[0] == ["no output"] * 2
    texts, counts = turn("f(1)", "f(1)")
    assert texts[0] == "21"
    assert texts[1].endswith("NameError: name 'f' is not defined")
    assert counts == {"ok": 1, "error": 1}
    for rollout in rollouts:
        rollout.close()


def test_an_error_is_told_by_the_last_lines_of_its_traceback_and_loses_nothing(python):
    told = python("def f(n): return f(n - 1) if n else 1 / 0\nprint('so far')\nx = 3\nf(9)")
    error, _, printed = told.partition("\nprinted before:\n")
    assert error.startswith("error: ")
    assert error.endswith("\nZeroDivisionError: division by zero")
    assert len(error.splitlines()) <= 4
    assert printed == "so far"
    assert python("x") == "3"
    assert "SyntaxError" in python("1 +").splitlines()[-1]
    assert python("raise SystemExit(2)") == "error: the code left with an exit status"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "over the CPU limit of 0.8 s"),
        ("import os; os._exit(1)", "the interpreter ended with status 1"),
        ("while True: print('x' * 1000)", "more than 65536 bytes of output"),
    ],
)
def test_a_call_that_ends_the_interpreter_says_so_and_the_next_has_a_new_one(python, code, why):
    assert python("x = 1\nx") == "1"
    assert python(code).startswith(f"error: {why}{ANEW}")
    assert "NameError: name 'x' is not defined" in python("x")
    assert python("x = 2\nx") == "2"


def test_long_answers_are_cut(python):
    assert python("print('y' * 1000)") == "y" * 300 + "... (700 more characters)"
    error = python("raise ValueError('y' * 1000 + 'end')")
    assert error.startswith("error: y")
    assert error.endswith("yend")
    assert len(error) == 307


def test_nothing_runs_in_this_process(python):
    assert python("import os\nos.getpid()") != str(os.getpid())
    with pytest.raises(ValueError, match="max_characters=0"):
        PythonTool(None, 0)


def test_a_session_that_is_closed_starts_nothing_any_more(sandbox):
    session = PythonTool(sandbox).start()
    assert session.call({"code": "x = 1\nx"}) == "1"
    session.close()
    assert session.call({"code": "1"}).startswith("error: the session had ended: killed")
