"""The first process of a sandbox: it stands between the interpreter and the trainer.

Imported by the sandbox's own processes, by path: standard library alone. It passes requests on,
collects output, watches the limits from outside the untrusted code, and ends everything that the
code has started. In a namespace of its own the kernel helps: its processes cannot signal this one,
orphans become its children, and all of them end when it does.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import time

import sandbox_processes
from sandbox_interpreter import OUT_OF_MEMORY
from sandbox_wire import frame, read_frame, write_frame

STRICT_TICK_SECONDS, WEAK_TICK_SECONDS = 0.02, 0.1  # between looks at the processes
_READ_BYTES = 1 << 16


class Supervisor:
    """Carries out the requests of one sandbox.

    Args:
      control: the socket to the trainer.
      pipes: (read, write) of the interpreter's stdin, stdout, stderr, commands and reports.
      interpreter: its process id.
      limits: as `sandbox.Limits` has them.
      user, scratch: the user that the code runs as, and its folder.
      strict: whether this is the first process of a namespace.
    """

    def __init__(
        self,
        control: int,
        pipes: list[tuple[int, int]],
        interpreter: int,
        limits: dict,
        user: int,
        scratch: str,
        strict: bool,
    ):
        self.control, self.interpreter, self.limits = control, interpreter, limits
        self.user, self.scratch, self.strict = user, scratch, strict
        self.tick_seconds = STRICT_TICK_SECONDS if strict else WEAK_TICK_SECONDS
        (_, self.stdin), (self.stdout, _), (self.stderr, _) = pipes[:3]
        (_, self.commands), (self.reports, _) = pipes[3:]
        self.wake, wake = os.pipe()  # written to when a child ends
        own = (self.stdin, self.stdout, self.stderr, self.commands, self.reports)
        for descriptor in (descriptor for pipe in pipes for descriptor in pipe):
            if descriptor not in own:
                os.close(descriptor)
        for descriptor in (*own, self.wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.readable = {control, self.stdout, self.stderr, self.reports, self.wake}
        self.unsent: dict[int, bytes] = {}
        self.report = bytearray()
        self.exit_code: int | None = None
        self.kind = self.stand_ins = None  # of the request under way

    def serve(self) -> None:
        """Carry out requests until one ends the sandbox; never returns."""
        self._begin()
        self._wait_for_end()
        if self.status != "ok":
            note = self.reply.decode() or self.note
            write_frame(self.control, json.dumps({"refused": note}).encode())
            self._end(1)
        write_frame(self.control, json.dumps({"ready": True}).encode())
        while True:
            try:
                request = json.loads(read_frame(self.control))
            except (EOFError, OSError):
                self._end(1)
            if request["kind"] == "end":
                self._end(0)
            write_frame(self.control, json.dumps(self._carry_out(request)).encode())
            if self.ended:
                self._end(0)

    def _carry_out(self, request: dict) -> dict:
        for name, text in request.pop("files", {}).items():
            self._write_file(name, text)
        stdin = request.pop("stdin", "").encode(errors="surrogatepass")
        if self.kind is None:  # the first request
            self.unsent[self.stdin] = stdin
        self.kind, self.stand_ins = request["kind"], request.get("stand_ins")
        self.unsent[self.commands] = frame(json.dumps(request).encode())
        self._begin()
        sandbox_processes.signal_all(signal.SIGCONT, self.strict, self.interpreter)
        self._wait_for_end()
        seconds = time.monotonic() - self.started
        if self.ended:
            sandbox_processes.kill_all(self.strict, self.interpreter)
        else:
            # Nothing runs between calls.
            sandbox_processes.signal_all(signal.SIGSTOP, self.strict, self.interpreter)
        for descriptor in (self.stdout, self.stderr):
            while descriptor in self.readable and self._take_output(descriptor):
                pass
        stdout, stderr = (
            bytes(self.texts[descriptor][: self.limits["output_bytes"]]).decode(errors="replace")
            for descriptor in (self.stdout, self.stderr)
        )
        return {
            "status": self.status,
            "stdout": stdout,
            "stderr": stderr,
            "seconds": seconds,
            "reply": self.reply.decode(errors="replace"),
            "note": self.note,
            "ended": self.ended,
        }

    def _begin(self) -> None:
        self.status, self.note, self.reply, self.ended = None, "", b"", False
        self.texts = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.started = self.looked = time.monotonic()
        self.asked = None  # since when it waits for an answer from outside: not its own time
        self.cpu_before = sandbox_processes.usage()[0]

    def _wait_for_end(self) -> None:
        while self.status is None:
            poll = select.poll()
            for descriptor in self.readable:
                poll.register(descriptor, select.POLLIN)
            for descriptor in self.unsent:
                poll.register(descriptor, select.POLLOUT)
            for descriptor, _ in poll.poll(self.tick_seconds * 1000):
                if descriptor in self.unsent:
                    self._send(descriptor)
                elif descriptor == self.control:
                    self._take_answer()
                elif descriptor == self.reports:
                    self._take_report()
                else:
                    self._take_output(descriptor)
            self._reap()
            if self.exit_code is not None:
                self._note_exit(self.exit_code)
            if time.monotonic() - self.looked >= self.tick_seconds:
                self._look()

    def _finish(self, status: str, note: str = "", ended: bool = True) -> None:
        """Note why the request is done; the first reason stands."""
        if self.status is None:
            self.status, self.note, self.ended = status, note, ended

    def _send(self, descriptor: int) -> None:
        rest = self.unsent[descriptor]
        try:
            rest = rest[os.write(descriptor, rest[:_READ_BYTES]) :] if rest else rest
        except BlockingIOError:
            return
        except BrokenPipeError:
            rest = b""
        self.unsent[descriptor] = rest
        if not rest:
            del self.unsent[descriptor]
            if descriptor == self.stdin:
                os.close(descriptor)

    def _read(self, descriptor: int) -> bytes:
        """What is there; nothing when nothing is, or when the other end is closed."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self.readable.discard(descriptor)
        return data

    def _take_output(self, descriptor: int) -> bool:
        data = self._read(descriptor)
        if descriptor in self.texts:
            room = self.limits["output_bytes"] - sum(len(text) for text in self.texts.values())
            self.texts[descriptor] += data[: max(0, room)]
            if len(data) > room:
                self._finish("output", f"more than {self.limits['output_bytes']} bytes of output")
        return bool(data)

    def _take_answer(self) -> None:
        try:
            answer = read_frame(self.control)
        except (EOFError, OSError):
            self._end(1)
        self.unsent[self.commands] = self.unsent.get(self.commands, b"") + frame(answer)
        if self.asked is not None:
            self.started += time.monotonic() - self.asked
            self.asked = None

    def _take_report(self) -> None:
        self.report += self._read(self.reports)
        size = int.from_bytes(self.report[:4], "big")
        if len(self.report) >= 4 and size > self.limits["output_bytes"]:
            return self._finish("output", f"a value of more than {size} bytes")
        if len(self.report) < 4 + size or len(self.report) < 5:
            return None
        letter, content = self.report[4:5], bytes(self.report[5 : 4 + size])
        del self.report[: 4 + size]
        if letter == b"a" and self.stand_ins:
            self.asked = time.monotonic()
            write_frame(
                self.control, json.dumps({"ask": content.decode(errors="replace")}).encode()
            )
            return None
        if letter == b"u" and self.stand_ins:
            return self._finish("infra_failure", content.decode(errors="replace"), ended=False)
        self.reply = content
        status = {b"o": "ok", b"e": "error", b"m": "memory"}.get(bytes(letter))
        if status is None:
            return self._finish("killed", "the interpreter's report cannot be read")
        return self._finish(status, ended=False)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                if process == self.interpreter:
                    self.exit_code = os.waitstatus_to_exitcode(status)

    def _note_exit(self, code: int) -> None:
        self._take_report()  # its last words may wait there
        self._look()  # a limit may be why
        if code == -signal.SIGXCPU:
            self._finish("timeout", f"over the CPU limit of {self.limits['cpu_seconds']} s")
        elif code < 0:
            self._finish("killed", f"ended by signal {-code}")
        elif self.kind != "program":
            self._finish("killed", f"the interpreter ended with status {code}")
        elif code == OUT_OF_MEMORY:
            self._finish("memory", f"over the memory limit of {self.limits['memory_bytes']} bytes")
        else:
            self._finish("error" if code else "ok")

    def _look(self) -> None:
        """Compare what the processes have used with the limits."""
        self.looked = now = time.monotonic()
        cpu_seconds, threads, used_bytes = sandbox_processes.usage()
        limits = self.limits
        if self.asked is None and now - self.started > limits["wall_seconds"]:
            self._finish("timeout", f"over the wall-clock limit of {limits['wall_seconds']} s")
        if cpu_seconds - self.cpu_before > limits["cpu_seconds"]:
            self._finish("timeout", f"over the CPU limit of {limits['cpu_seconds']} s")
        if used_bytes > limits["memory_bytes"]:
            self._finish("memory", f"over the memory limit of {limits['memory_bytes']} bytes")
        if threads > limits["processes"] + 2:
            self._finish("killed", f"more than {limits['processes']} processes and threads")

    def _end(self, status: int) -> None:
        sandbox_processes.kill_all(self.strict, self.interpreter)
        if not self.strict:
            os.chdir("/")
            shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(status)

    def _write_file(self, name: str, text: str) -> None:
        path = os.path.join(self.scratch, name)
        folders = [os.path.dirname(path)]
        while folders[-1] != self.scratch and not os.path.isdir(folders[-1]):
            folders.append(os.path.dirname(folders[-1]))
        for folder in reversed(folders[:-1]):
            os.mkdir(folder)
            os.chown(folder, self.user, -1)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.chown(path, self.user, -1)
