"""The trainer's end of a sandbox: the limits, the outcomes, and one worker process.

A worker makes one sandbox after another (`sandbox_worker.py`), so the next is ready by the time
that it is wanted. It is started as a fresh interpreter, since threads of the trainer forbid a fork,
with an environment of its own, and it alone holds the other end of the socket: when either side
ends, the other notices.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from orbit_jax.tasks.sandbox_wire import frame, read_frame_by

START_SECONDS = 60.0  # of a fresh interpreter on a loaded machine; not part of any limit
GRACE_SECONDS = 10.0  # for a supervisor to report that a limit is passed
STOP_SECONDS = 2.0  # for a weak sandbox to clean up; the kernel cleans up after a strict one
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"}
# Not by a plain import: this folder, which holds a math.py, comes after the standard library.
BOOTSTRAP = """
import sys
sys.path.append(sys.argv[1])
import sandbox_worker
sys.path.pop()
sandbox_worker.main(int(sys.argv[2]))
"""


@dataclass(frozen=True)
class Limits:
    """What one program, or one call in a session, may use.

    Attributes:
      wall_seconds: on the clock.
      cpu_seconds: of all its processes together.
      memory_bytes: of address space for each process, and of memory for all together.
      processes: processes and threads at one time.
      file_bytes: of one file.
      scratch_bytes: of all files (`strict` only).
      output_bytes: of stdout and stderr together.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    output_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind = (int, float) if name.endswith("_seconds") else int
            if not isinstance(value, kind) or not value > 0:
                raise ValueError(
                    f"Limits.{name}={value!r}: it must be a positive number, whole but for seconds"
                )


@dataclass(frozen=True)
class Outcome:
    """What became of a program or call.

    Attributes:
      status: `ok`; `error`: an exception or a non-zero exit; `timeout`, `memory`, `output`: over
        that limit; `killed`: ended by a signal or otherwise gone; `infra_failure`: the sandbox
        itself failed.
      stdout, stderr: as text, up to the limit; stderr ends with what the sandbox has to say.
      seconds: on the clock.
      reply: of `Session.invoke`, JSON: `{"value": ...}` as `sandbox_wire.encode` gives it, or
        `{"raised": name, "text": ...}`. Like the texts, it is what untrusted code says.
    """

    status: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    reply: str = ""


class Refused(OSError):
    """The machine does not allow the isolation that was asked for."""


def infra_failure(error: Exception) -> Outcome:
    """The outcome for a sandbox that failed by this error."""
    return Outcome("infra_failure", stderr=f"the sandbox failed: {error or type(error).__name__}")


class Worker:
    """One worker process; used by one thread at a time.

    Args:
      limits: of every program and call.
      isolation: `strict` or `weak`.
      scratch: for `weak`, the folder to make scratch folders in.

    Raises:
      OSError: when no process can be started.
    """

    def __init__(self, limits: Limits, isolation: str, scratch: str | None):
        self.limits, self.isolation = limits, isolation
        self.ready = False
        self.socket, theirs = socket.socketpair()
        environment = dict(ENVIRONMENT)
        if scratch:
            environment |= {"HOME": scratch, "TMPDIR": scratch}
        options = ["-I", "-S", "-X", "utf8", "-c", BOOTSTRAP]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *options, str(Path(__file__).parent), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self.socket.close()
            raise
        self._send({"isolation": isolation, "limits": asdict(limits), "scratch": scratch})

    def prepare(self) -> None:
        """Wait until a sandbox is ready; EOFError, TimeoutError or Refused when none will be."""
        if not self.ready:
            answer = self._receive(START_SECONDS)
            if "refused" in answer:
                raise Refused(answer["refused"])
            self.ready = True

    def ask(
        self, request: dict, answer: Callable[[str], str] | None = None
    ) -> tuple[Outcome, bool]:
        """Let the sandbox carry out a request.

        Args:
          request: as `sandbox_interpreter.py` has them.
          answer: what replies to the questions that a call may ask.

        Returns:
          The outcome, and whether it ended the sandbox; then the next one is being made.

        Raises:
          EOFError, OSError: when the sandbox itself fails.
        """
        self.prepare()
        self._send(request)
        while True:
            result = self._receive(self.limits.wall_seconds + GRACE_SECONDS)
            if "ask" not in result:
                break
            self.socket.settimeout(GRACE_SECONDS)
            self.socket.sendall(frame(answer(result["ask"]).encode(errors="replace")))
        self.ready = not result["ended"]
        stderr = result["stderr"]
        if result["note"]:
            stderr += ("\n" if stderr and not stderr.endswith("\n") else "") + (
                f"[sandbox: {result['note']}]\n"
            )
        outcome = Outcome(
            result["status"], result["stdout"], stderr, result["seconds"], result["reply"]
        )
        return outcome, result["ended"]

    def end(self) -> None:
        """End the sandbox; the next one is being made."""
        if self.ready:
            self._send({"kind": "end"})
            self.ready = False

    def stop(self) -> None:
        """End the process and everything below it; from any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        if self.isolation == "weak":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()

    def _send(self, message: dict) -> None:
        self.socket.settimeout(START_SECONDS)
        self.socket.sendall(frame(json.dumps(message).encode()))

    def _receive(self, seconds: float) -> dict:
        deadline = time.monotonic() + seconds

        def read(count: int) -> bytes:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            return self.socket.recv(count)

        return json.loads(read_frame_by(read))
