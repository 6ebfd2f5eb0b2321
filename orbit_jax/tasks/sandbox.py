"""Untrusted Python code in processes of its own, with limits: programs and stateful sessions.

With `isolation="strict"`, the default, code runs in Linux namespaces: no network, no sight of the
trainer's processes, environment or files, a scratch folder in memory that goes with it, and when it
ends or passes a limit the kernel ends everything that it started. A machine that cannot do this is
refused. `isolation="weak"` has resource limits, a scrubbed environment and Python's audit hooks
only: it must be named, and is announced by a warning.

Code is executed by fresh interpreters that worker processes make; nothing is ever executed in, or
forked from, the trainer's process. A failure of the sandbox itself is an outcome of its own,
`infra_failure`: the sample must be masked, never scored 0.
"""

import contextlib
import json
import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from orbit_jax.tasks.sandbox_link import Limits, Outcome, Refused, Worker, infra_failure
from orbit_jax.tasks.sandbox_wire import encode

ISOLATIONS = ("strict", "weak")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """One entry of `Sandbox.run_batch`; the arguments of `Sandbox.run`."""

    code: str
    stdin: str = ""
    files: Mapping[str, str] | None = None


class Sandbox:
    """Runs code from any thread, `workers` programs or calls at the same time.

    Args:
      workers: programs and calls that run at once; more wait.
      limits: of each of them.
      isolation: `strict`, or `weak` where that is accepted.

    Raises:
      ValueError: when an argument is no such thing, or this machine cannot isolate strictly.
    """

    def __init__(self, workers: int = 1, limits: Limits | None = None, isolation: str = "strict"):
        if workers < 1:
            raise ValueError(f"Sandbox needs workers >= 1, got workers={workers}.")
        if isolation not in ISOLATIONS:
            raise ValueError(f"isolation={isolation!r}: use one of {', '.join(ISOLATIONS)}")
        self.workers, self.limits, self.isolation = workers, limits or Limits(), isolation
        self._slots = threading.Semaphore(workers)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._live: set[Worker] = set()
        self._closed, self._scratch = False, None
        if isolation == "weak":
            _logger.warning(
                "isolation='weak': untrusted code runs WITHOUT a sandbox of the kernel. It has "
                "limits and a scrubbed environment, but a determined program can read this user's "
                "files and reach the network. Use isolation='strict' where you can."
            )
            self._scratch = tempfile.TemporaryDirectory(prefix="sandbox_")
        try:
            worker = self._take()
            worker.prepare()
            self._give_back(worker)
        except Refused as error:
            self.close()
            raise ValueError(
                f"isolation={isolation!r} cannot be had on this machine: {error}; allow "
                "unprivileged user namespaces, or name isolation='weak' if that is acceptable."
            ) from None
        except (EOFError, OSError) as error:
            self.close()
            raise ValueError(f"No sandbox can be started here: {error!r}.") from None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, sessions' too; what still runs ends as `infra_failure`."""
        self._closed = True
        for worker in list(self._live):
            self._discard(worker)
        if self._scratch is not None:
            self._scratch.cleanup()

    def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """Execute a program in a fresh interpreter.

        Args:
          code: its text; it finds itself in a scratch folder that is its own.
          stdin: what it can read.
          files: text by relative path, put into its folder.

        Raises:
          ValueError: when a path leaves the folder, or files and stdin do not fit into it.
        """
        files = dict(files or {})
        self._check_files(stdin, files)
        request = {"kind": "program", "code": code, "stdin": stdin, "files": files}
        with self._slots:
            for attempt in range(2):  # a worker may have died while idle: ask a fresh one once
                worker = None
                try:
                    worker = self._take(fresh=attempt > 0)
                    outcome, _ = worker.ask(request)
                except (EOFError, OSError) as error:
                    self._discard(worker)
                    if self._closed or attempt or isinstance(error, TimeoutError):
                        return infra_failure(error)
                except BaseException:  # Ctrl-C: a late answer must not meet the next request
                    self._discard(worker)
                    raise
                else:
                    self._give_back(worker)
                    return outcome
        raise AssertionError("unreachable")

    def run_batch(self, programs: Sequence[Program]) -> list[Outcome]:
        """Execute programs, `workers` at a time; outcomes in their order."""
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(lambda p: self.run(p.code, p.stdin, p.files), programs))

    def session(self) -> "Session":
        """An interpreter that keeps its variables between calls; it starts with the first."""
        return Session(self)

    def _check_files(self, stdin: str, files: Mapping[str, str]) -> None:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise ValueError(f"files: {name!r} must be a relative path within the folder")
        size = sum(len(text.encode(errors="surrogatepass")) for text in (stdin, *files.values()))
        if size > self.limits.scratch_bytes:
            raise ValueError(
                f"files and stdin have {size} bytes, more than Limits.scratch_bytes="
                f"{self.limits.scratch_bytes}: raise that limit or pass less"
            )

    def _take(self, fresh: bool = False) -> Worker:
        """A worker that nobody else has until it is given back or discarded."""
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        with contextlib.suppress(queue.Empty):
            while not fresh:
                worker = self._idle.get_nowait()
                if worker.process.poll() is None:
                    return worker
                self._discard(worker)
        worker = Worker(self.limits, self.isolation, self._scratch and self._scratch.name)
        self._live.add(worker)
        return worker

    def _give_back(self, worker: Worker) -> None:
        self._idle.put(worker)

    def _discard(self, worker: Worker | None) -> None:
        if worker is not None:
            self._live.discard(worker)
            worker.stop()


class Session:
    """An interpreter with variables that last; calls of several threads wait for each other.

    Attributes:
      ended: the outcome that ended it, None while it lives. A call that passes a limit ends it.
      seconds: on the clock, of all its calls together.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.ended: Outcome | None = None
        self.seconds = 0.0
        self._sandbox = sandbox
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        code: str,
        name: str = "__main__",
        stand_ins: Sequence[str] = (),
        program: "Session | None" = None,
    ) -> Outcome:
        """Execute code among the variables that earlier calls left.

        A value that the code ends with is printed. What it prints or raises is in the outcome.

        Args:
          code: its text.
          name: the module's `__name__`.
          stand_ins: names that stand, in `code`, for what they mean in the session `program`:
            functions are called there, and only plain values come back. Together they may take
            `Limits.wall_seconds`.
          program: that session; it must be another one.
        """
        request = {"kind": "call", "code": code, "name": name, "stand_ins": list(stand_ins)}
        until = program and program.seconds + self._sandbox.limits.wall_seconds
        with self._sandbox._slots:
            return self._ask(request, program and (lambda asked: program._answer(asked, until)))

    def invoke(
        self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Call a function by name with plain values; what it returns is in `Outcome.reply`.

        Raises:
          TypeError: when an argument is no plain value.
        """
        question = {
            "action": "call",
            "of": function,
            "args": [encode(arg, _refuse) for arg in args],
            "kwargs": {name: encode(arg, _refuse) for name, arg in (kwargs or {}).items()},
        }
        with self._sandbox._slots:
            return self._ask({"kind": "invoke", **question})

    def close(self) -> None:
        """End it and all that it has started."""
        worker, self._worker = self._worker, None
        self.ended = self.ended or Outcome("killed", stderr="the session was closed")
        if worker is None:
            return
        if self._lock.acquire(blocking=False):
            try:
                worker.end()
                self._sandbox._give_back(worker)
            except (EOFError, OSError):
                self._sandbox._discard(worker)
            finally:
                self._lock.release()
        else:  # a call is under way in another thread
            self._sandbox._discard(worker)

    def _answer(self, question: str, until_seconds: float) -> str:
        """What an `invoke` of this session says; the question comes from the tests' session."""
        asked = json.loads(question)
        request = {key: asked[key] for key in ("action", "of", "args", "kwargs")}
        status = "timeout"
        if self.seconds < until_seconds:
            outcome = self._ask({"kind": "invoke", **request})
            if outcome.status == "ok":
                return outcome.reply
            status = outcome.status
        return json.dumps({"raised": "RuntimeError", "text": f"no answer: {status}"})

    def _ask(self, request: dict, answer: Callable[[str], str] | None = None) -> Outcome:
        with self._lock:
            fresh = self._worker is None
            for attempt in range(2):  # as in Sandbox.run, while there is nothing to lose
                if self.ended is not None:
                    return Outcome("killed", stderr=f"the session had ended: {self.ended.status}")
                try:
                    self._worker = worker = self._worker or self._sandbox._take(attempt > 0)
                    outcome, ended = worker.ask(request, answer)
                except (EOFError, OSError) as error:
                    self._sandbox._discard(self._worker)
                    self._worker = None
                    if not fresh or attempt or isinstance(error, TimeoutError):
                        self.ended = self.ended or infra_failure(error)
                        return self.ended
                except BaseException:
                    self._sandbox._discard(self._worker)
                    self._worker = None
                    self.ended = Outcome("killed", stderr="the session was interrupted")
                    raise
                else:
                    self.seconds += outcome.seconds
                    if ended:
                        self.ended, self._worker = outcome, None
                        self._sandbox._give_back(worker)
                    return outcome
        raise AssertionError("unreachable")


def _refuse(value: Any) -> int:
    raise TypeError(
        f"{value!r:.80} is no plain value: pass numbers, text, lists, dicts and the like"
    )
