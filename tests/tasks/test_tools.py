"""Running tools side by side: slow and failing ones hold up nobody, and nothing is lost."""

import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from orbit_jax.tasks.call_readers import ToolCall
from orbit_jax.tasks.tools import RolloutTools, ToolPool, run_tools

OK = ToolCall("ok", {"x": "1"})
LIMIT = 2.0  # seconds that a loaded machine, too, needs less than for an answer


class ATool:
    """A tool whose sessions do what a function does."""

    description = ""
    parameters = {"type": "object", "properties": {"x": {}}, "required": ["x"]}  # noqa: RUF012

    def __init__(self, name: str, call, start=lambda: None, close=lambda: None):
        self.name, self._call, self._start, self._close = name, call, start, close
        self.started = self.closed = 0

    def start(self):
        self.started += 1
        self._start()
        return _Session(self)


class _Session:
    def __init__(self, tool: ATool):
        self.tool, self.calls = tool, 0

    def call(self, arguments):
        self.calls += 1
        return self.tool._call(self, arguments)

    def close(self):
        self.tool.closed += 1
        self.tool._close()


def fail(session, arguments):
    raise {"exit": SystemExit, "value": ValueError, "key": KeyboardInterrupt}[arguments["x"]]("no")


def wait_for_ever(*_):
    threading.Event().wait()


def make_tools() -> dict[str, ATool]:
    tools = (
        ATool("ok", lambda session, arguments: f"got {arguments['x']}"),
        ATool("count", lambda session, arguments: str(session.calls)),
        ATool("sleeps", lambda session, arguments: time.sleep(0.02) or "slept"),
        ATool("oversleeps", lambda session, arguments: time.sleep(2 * LIMIT) or "too late"),
        ATool("raises", fail),
        ATool("never", wait_for_ever),
        ATool("never_starts", lambda session, arguments: "", start=wait_for_ever),
        ATool("cannot_start", lambda session, arguments: "", start=lambda: 1 / 0),
        ATool("no_text", lambda session, arguments: 3),
        ATool("tells", lambda session, arguments: "error: told"),
        ATool("long", lambda session, arguments: "x" * 10_000),
        ATool("surrogate", lambda session, arguments: "a\ud83d"),
    )
    return {tool.name: tool for tool in tools}


def run_one(*calls: ToolCall):
    (results,), counts = run_tools([calls], [RolloutTools(make_tools().values())], LIMIT, 4)
    assert sum(counts.values()) == len(calls) == len(results)
    return [(result.text, result.outcome) for result in results]


def test_64_rollouts_with_slow_and_failing_tools_lose_nothing_and_stall_nowhere():
    names = ("ok", "sleeps", "raises", "never", "oversleeps", "never_starts", "cannot_start", "ok")
    expected = {"ok": "ok", "sleeps": "ok", "raises": "error", "cannot_start": "error"}
    calls = [(ToolCall(names[i % 8], {"x": "value"}),) for i in range(64)]
    rollouts = [RolloutTools(make_tools().values()) for _ in calls]
    start = time.monotonic()
    results, counts = run_tools(calls, rollouts, LIMIT, workers=64)
    seconds = time.monotonic() - start
    assert LIMIT <= seconds < 10 * LIMIT  # one after another: 24 times
    outcomes = [result.outcome for (result,) in results]
    assert outcomes == [expected.get(names[i % 8], "timeout") for i in range(64)]
    assert counts == Counter(outcomes) == {"ok": 24, "error": 16, "timeout": 24}
    assert all(r.text.startswith("error: ") for (r,) in results if r.outcome != "ok")
    assert results[3][0].text == "error: no answer within 2 seconds; the tool starts anew"
    for rollout in rollouts:
        rollout.close()
    assert time.monotonic() - start < seconds + 10 * LIMIT


def test_calls_that_never_return_hold_no_worker():
    names = ["never"] * 6 + ["ok"] * 6
    calls = [(ToolCall(name, {"x": "1"}),) for name in names]
    tools = [RolloutTools(make_tools().values()) for _ in calls]
    start = time.monotonic()
    results, counts = run_tools(calls, tools, 1.0, workers=2)
    assert 3 <= time.monotonic() - start < 30  # six by two
    assert counts == {"timeout": 6, "ok": 6}
    assert [r.text for (r,) in results[6:]] == ["got 1"] * 6


def test_a_late_answer_is_not_an_answer_to_the_next_call():
    late, counts_up = ToolCall("oversleeps", {"x": "1"}), ToolCall("count", {"x": "1"})
    tools = RolloutTools(make_tools().values())
    (results,), _ = run_tools([(counts_up, late, counts_up, OK)], [tools], LIMIT, 1)
    assert [r.outcome for r in results] == ["ok", "timeout", "ok", "ok"]
    assert [r.text for r in results][2:] == ["2", "got 1"]  # other tools keep their sessions
    time.sleep(2 * LIMIT)
    (results,), _ = run_tools([(counts_up,)], [tools], LIMIT, 1)
    assert results[0].text == "3"


def test_a_tool_that_timed_out_is_closed_and_starts_anew():
    released = threading.Event()
    tool = ATool(
        "stuck",
        lambda session, arguments: str(released.wait(0 if arguments["x"] == "go" else None)),
        close=released.set,
    )
    rollout = RolloutTools([tool])
    stuck, go = (ToolCall("stuck", {"x": x}) for x in ("stay", "go"))
    (results,), _ = run_tools([(go, stuck, go)], [rollout], LIMIT, 1)
    assert [r.outcome for r in results] == ["ok", "timeout", "ok"]
    assert released.wait(1.0)
    assert (tool.started, tool.closed) == (2, 1)
    rollout.close()
    assert (tool.started, tool.closed) == (2, 2)
    rollout.close()
    assert tool.closed == 2


def test_a_session_that_starts_after_it_was_given_up_is_closed():
    begun = threading.Event()
    tool = ATool("slow", lambda session, arguments: "", start=lambda: begun.wait(5.0))
    run_tools([(ToolCall("slow", {"x": "1"}),)], [RolloutTools([tool])], 0.05, 1)
    assert tool.closed == 0
    begun.set()
    deadline = time.monotonic() + 2.0
    while not tool.closed and time.monotonic() < deadline:
        time.sleep(0.005)
    assert tool.closed == 1


def test_whatever_a_tool_does_becomes_a_text():
    assert run_one(
        ToolCall("raises", {"x": "value"}),
        ToolCall("raises", {"x": "exit"}),
        ToolCall("raises", {"x": "key"}),
        ToolCall("no_text", {"x": "1"}),
        ToolCall("tells", {"x": "1"}),
        ToolCall("surrogate", {"x": "1"}),
        ToolCall("cannot_start", {"x": "1"}),
    ) == [
        ("error: ValueError: no", "error"),
        ("error: SystemExit: no", "error"),
        ("error: KeyboardInterrupt: no", "error"),
        ("error: TypeError: the tool gave int, not text", "error"),
        ("error: told", "error"),
        ("a?", "ok"),
        ("error: ZeroDivisionError: division by zero", "error"),
    ]
    ((text, _),) = run_one(ToolCall("long", {"x": "1"}))
    assert text == "x" * 4000 + "... (6000 more characters)"


def test_a_malformed_call_and_one_of_no_tool_are_answered_without_running_anything():
    malformed = ToolCall("ok", {"x": "1"}, error="the call is not valid JSON")
    answers = run_one(malformed, ToolCall("python", {}), ToolCall("ok", {}), OK)
    assert [outcome for _, outcome in answers] == ["error", "error", "error", "ok"]
    assert answers[0][0] == "error: the call is not valid JSON"
    assert answers[1][0].startswith("error: there is no tool 'python'; the tools are: ok, count,")
    assert answers[2][0] == "error: the tool ok needs the argument 'x'"


def test_a_session_is_a_rollouts_own_and_lives_for_all_its_turns():
    tools = make_tools()
    rollouts = [RolloutTools(tools.values()) for _ in range(3)]
    call = ToolCall("count", {"x": "1"})
    for turn in range(2):
        results, _ = run_tools([(call, call), (), (call, call)], rollouts, LIMIT, 4)
        texts = [[r.text for r in of_rollout] for of_rollout in results]
        counted = [str(2 * turn + 1), str(2 * turn + 2)]
        assert texts == [counted, [], counted]
    assert tools["count"].started == 2


def test_who_is_done_does_not_wait_for_others():
    pool = ToolPool(max_seconds=LIMIT, workers=2)
    never = ToolCall("never", {"x": "1"})
    start = time.monotonic()
    pool.submit("slow", [never], RolloutTools(make_tools().values()))
    pool.submit("fast", [OK, OK], RolloutTools(make_tools().values()))
    first = pool.collect(5.0)
    assert list(first) == ["fast"]
    assert [r.text for r in first["fast"]] == ["got 1", "got 1"]
    assert time.monotonic() - start < LIMIT
    assert (pool.collect(), pool.pending) == ({}, 1)
    assert [r.outcome for r in pool.collect(5.0)["slow"]] == ["timeout"]
    assert (pool.collect(5.0), pool.pending) == ({}, 0)
    assert pool.counts == {"ok": 2, "timeout": 1}


def test_no_more_calls_run_at_once_than_there_are_workers():
    running, most, lock = [], [], threading.Lock()

    def call(session, arguments):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.01)
        with lock:
            running.pop()
        return ""

    tools = [RolloutTools([ATool("t", call)]) for _ in range(12)]
    _, counts = run_tools([(ToolCall("t", {"x": "1"}),)] * 12, tools, 5.0, workers=3)
    assert counts == {"ok": 12}
    assert max(most) == 3


def test_a_thread_that_cannot_start_is_an_error_of_its_call(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_one(OK, OK) == [("error: RuntimeError: can't start new thread", "error")] * 2


def test_a_process_ends_although_a_tool_does_not():
    code = (
        "import threading, time\n"
        "from orbit_jax.tasks.call_readers import ToolCall\n"
        "from orbit_jax.tasks.tools import RolloutTools, run_tools\n"
        "class Stuck:\n"
        "    name, parameters = 'stuck', {}\n"
        "    def start(self): return self\n"
        "    def call(self, arguments): threading.Event().wait()\n"
        "    def close(self): threading.Event().wait()\n"
        "class Quick(Stuck):\n"
        "    name = 'quick'\n"
        "    def call(self, arguments): return ''\n"
        "tools = RolloutTools([Stuck(), Quick()])\n"
        "print(run_tools([(ToolCall('stuck'),)], [tools], 0.1, 1)[1]['timeout'])\n"
        "run_tools([(ToolCall('quick'),)], [tools], 0.1, 1)\n"
        "tools.close(0.1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="got max_seconds=0, workers=1"):
        ToolPool(max_seconds=0, workers=1)
    pool, tools = ToolPool(), RolloutTools([])
    with pytest.raises(ValueError, match="submit got 0 calls"):
        pool.submit(1, (), tools)
    pool.submit(1, (OK,), tools)
    with pytest.raises(ValueError, match="for the key 1"):
        pool.submit(1, (OK,), tools)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        run_tools([(OK,)], [])
