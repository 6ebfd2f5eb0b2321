"""Running tools: the calls of many rollouts side by side, each with a limit of wall-clock time.

A call runs in a thread of its own. One that is late is answered with an error and left behind: its
thread cannot be ended, but holds no worker, no other rollout and not the end of the process. So
what may compute for long belongs into a process that its session can end (`close`).
"""

import threading
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orbit_jax.tasks.call_readers import ToolCall
from orbit_jax.tasks.task import Tool, ToolSession

ERROR = "error: "  # what the text of a failed call begins with
MAX_FAULT_CHARACTERS = 500  # of what an exception says


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: `text` for the model, and the `outcome` ok, error or timeout.

    Of a user's reply it may be `over` as well.
    """

    text: str
    outcome: str


class Answering(Protocol):
    """What calls are asked of, by one call at a time."""

    def run(self, call: ToolCall) -> ToolResult:
        """The result of a call, however long it takes; it raises nothing."""
        ...

    def drop(self, name: str) -> object:
        """Gives up what a call of that name, which is late, is doing."""
        ...


class RolloutTools:
    """The tools of one rollout; a session starts with the first call that needs it.

    Used by one call at a time. After `drop` the tool's next call has a new session.
    """

    def __init__(self, tools: Sequence[Tool]):
        self._tools = {tool.name: tool for tool in tools}
        self._sessions: dict[str, _Session] = {}

    def run(self, call: ToolCall) -> ToolResult:
        """The result of a call, however long it takes; whatever goes wrong is an error's text."""
        try:
            problem = call.error or self._problem(call)
            if problem:
                return ToolResult(ERROR + problem, "error")
            tool = self._tools[call.name]
            text = self._sessions.setdefault(call.name, _Session(tool)).call(call.arguments)
            if not isinstance(text, str):
                raise TypeError(f"the tool gave {type(text).__name__}, not text")
            text = text.encode("utf-8", "replace").decode()
            return ToolResult(text, "error" if text.startswith(ERROR) else "ok")
        except BaseException as fault:  # a tool may raise anything; nothing of it ends the run
            return ToolResult(ERROR + tell_fault(fault), "error")

    def drop(self, name: str) -> threading.Thread | None:
        """Forgets a tool's session; returns the thread that closes it, if there is one."""
        session = self._sessions.pop(name, None)
        return session.drop() if session else None

    def close(self, max_seconds: float = 1.0) -> None:
        """Closes all sessions, waiting so long for each at most."""
        for thread in [self.drop(name) for name in list(self._sessions)]:
            if thread is not None:
                thread.join(max_seconds)

    def _problem(self, call: ToolCall) -> str:
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"there is no tool {call.name!r}; the tools are: {known}"
        required = self._tools[call.name].parameters.get("required", ())
        missing = [name for name in required if name not in call.arguments]
        return f"the tool {call.name} needs the argument {missing[0]!r}" if missing else ""


class ToolPool:
    """Runs the calls of turns, those of one turn in order and different turns side by side.

    Args:
      max_seconds: wall-clock limit of one call, the start of its session included.
      workers: calls under way at the same time; a call that was left behind is none of them.
      max_characters: of one result; longer ones are cut and say so.

    Attributes:
      counts: calls by outcome.

    Raises:
      ValueError: when an argument is not positive.
    """

    def __init__(self, max_seconds: float = 10.0, workers: int = 16, max_characters: int = 4000):
        if max_seconds <= 0 or workers < 1 or max_characters < 1:
            raise ValueError(
                f"ToolPool needs positive limits, got max_seconds={max_seconds}, workers={workers} "
                f"and max_characters={max_characters}."
            )
        self.max_seconds, self.workers, self.max_characters = max_seconds, workers, max_characters
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[_Turn] = deque()
        self._finished: list[_Turn] = []
        self._running = 0
        self._keys: set[Hashable] = set()

    @property
    def pending(self) -> int:
        """Turns that were submitted and not yet collected."""
        return len(self._keys)

    def submit(self, key: Hashable, calls: Sequence[ToolCall], tools: Answering) -> None:
        """Starts the calls of a turn as soon as there is a worker, and returns at once.

        Raises:
          ValueError: when there is no call, or the key is that of a turn still to be collected.
        """
        if not calls or key in self._keys:
            raise ValueError(
                f"submit got {len(calls)} calls for the key {key!r}: give at least one call, and "
                "collect a turn before its key is used again"
            )
        with self._changed:
            self._keys.add(key)
            self._waiting.append(_Turn(key, tuple(calls), tools))
            self._start_waiting()

    def collect(self, max_wait_seconds: float = 0.0) -> dict[Hashable, tuple[ToolResult, ...]]:
        """Results of the turns that are done, in the order of their calls.

        Waits for the first of them, but no longer than that; empty if none is done by then.
        """
        with self._changed:
            if self._keys and not self._finished:
                self._changed.wait_for(lambda: self._finished, max_wait_seconds)
            done, self._finished = self._finished, []
            self._keys.difference_update(turn.key for turn in done)
        return {turn.key: tuple(turn.results) for turn in done}

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self.workers:
            turn = self._waiting.popleft()
            attempt = _Attempt(turn, turn.calls[len(turn.results)])
            late = ToolResult(
                f"{ERROR}no answer within {self.max_seconds:g} seconds; the tool starts anew",
                "timeout",
            )
            attempt.timer = threading.Timer(self.max_seconds, self._finish, (attempt, late))
            attempt.timer.daemon = True
            thread = threading.Thread(target=self._work, args=(attempt,), daemon=True)
            self._running += 1
            try:
                attempt.timer.start()
                thread.start()
            except RuntimeError as fault:  # the system gives no more threads
                self._finish(attempt, ToolResult(ERROR + tell_fault(fault), "error"))

    def _work(self, attempt: "_Attempt") -> None:
        self._finish(attempt, attempt.turn.tools.run(attempt.call))

    def _finish(self, attempt: "_Attempt", result: ToolResult) -> None:
        with self._changed:
            if attempt.done:  # the answer came too late
                return
            attempt.done = True
            attempt.timer.cancel()
            turn = attempt.turn
            if result.outcome == "timeout":
                turn.tools.drop(attempt.call.name)
            turn.results.append(ToolResult(self._cut(result.text), result.outcome))
            self.counts[result.outcome] += 1
            self._running -= 1
            if len(turn.results) < len(turn.calls):
                self._waiting.appendleft(turn)
            else:
                self._finished.append(turn)
                self._changed.notify_all()
            self._start_waiting()

    def _cut(self, text: str) -> str:
        more = len(text) - self.max_characters
        return text if more <= 0 else f"{text[: self.max_characters]}... ({more} more characters)"


def run_tools(
    calls: Sequence[Sequence[ToolCall]],
    tools: Sequence[RolloutTools],
    max_seconds: float = 10.0,
    workers: int = 16,
) -> tuple[list[tuple[ToolResult, ...]], Counter[str]]:
    """Runs the calls of a turn of many rollouts and waits for all of them.

    Args:
      calls: of each rollout, which may have none.
      tools: of each rollout.
      max_seconds, workers: as of `ToolPool`.

    Returns:
      The results of each rollout in the order of its calls, and calls counted by outcome.
    """
    pool = ToolPool(max_seconds, workers)
    results: list[tuple[ToolResult, ...]] = [()] * len(calls)
    for i, (of_rollout, its_tools) in enumerate(zip(calls, tools, strict=True)):
        if of_rollout:
            pool.submit(i, of_rollout, its_tools)
    while pool.pending:
        for i, of_rollout in pool.collect(max_seconds).items():
            results[i] = of_rollout
    return results, pool.counts


def tell_fault(fault: BaseException) -> str:
    """What an exception says, at some length; even that may raise."""
    try:
        text = f"{type(fault).__name__}: {fault}"
        return text.encode("utf-8", "replace").decode()[:MAX_FAULT_CHARACTERS]
    except Exception:
        return type(fault).__name__


@dataclass
class _Turn:
    key: Hashable
    calls: tuple[ToolCall, ...]
    tools: Answering
    results: list[ToolResult] = field(default_factory=list)


@dataclass(eq=False)
class _Attempt:
    """A call under way."""

    turn: _Turn
    call: ToolCall
    done: bool = False
    timer: threading.Timer = field(init=False)


class _Session:
    """A tool's session, started by its first call; closed once, whenever it is dropped."""

    def __init__(self, tool: Tool):
        self._tool = tool
        self._session: ToolSession | None = None
        self._dropped = False
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any]) -> str:
        session = self._session
        if session is None:
            session = self._tool.start()
            with self._lock:
                self._session, dropped = session, self._dropped
            if dropped:  # while it started: nobody waits for an answer
                session.close()
                return ""
        return session.call(arguments)

    def drop(self) -> threading.Thread | None:
        with self._lock:
            self._dropped, session = True, self._session
        if session is None:
            return None
        thread = threading.Thread(target=_close, args=(session,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads, and closing may take for ever
            return None
        return thread


def _close(session: ToolSession) -> None:
    try:
        session.close()
    except BaseException:  # nobody waits for what it gives
        return
