"""The process that makes sandboxes, started by `sandbox.py`.

Standard library alone; it imports nothing of this package but the files beside this one, by path.
It forks one sandbox after another: it has a single thread and nothing to hide, so a fork is safe
and saves an interpreter's start. The first process of each sandbox puts up its walls and forks the
interpreter of untrusted code, which it then supervises.
"""

import gc
import json
import os
import signal
import sys
from typing import NoReturn

import sandbox_walls
from sandbox_filters import refuse_events
from sandbox_interpreter import Interpreter
from sandbox_supervisor import Supervisor
from sandbox_wire import read_frame, write_frame


def main(control: int) -> NoReturn:
    """Fork sandboxes until one ends otherwise than by its work being done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = json.loads(read_frame(control))
    sys.executable = os.path.realpath(sys.executable)  # the path by which a sandbox has it
    worker = os.getpid()
    gc.collect()
    gc.freeze()  # what is loaded so far stays as it is: fewer pages to copy
    while True:
        child = os.fork()
        if child == 0:
            sandbox_walls.die_with_parent()
            _become_sandbox(control, config, worker)
        if os.waitpid(child, 0)[1]:
            os._exit(1)


def _become_sandbox(control: int, config: dict, worker: int) -> NoReturn:
    strict, limits = config["isolation"] == "strict", config["limits"]
    if os.getppid() != worker:
        os._exit(1)
    try:
        if strict:
            user = sandbox_walls.enter_namespaces()
            first = os.fork()
            if first:
                os.close(control)
                os._exit(1 if os.waitpid(first, 0)[1] else 0)
            sandbox_walls.die_with_parent()
            sandbox_walls.build_root(user, limits["scratch_bytes"])
            scratch = sandbox_walls.SCRATCH
        else:
            user = os.geteuid()
            sandbox_walls.adopt_orphans()
            scratch = os.path.join(config["scratch"], str(os.getpid()))
            os.mkdir(scratch, 0o700)
            os.chdir(scratch)
        pipes = [os.pipe() for _ in range(5)]  # stdin, stdout, stderr, commands, reports
        interpreter = os.fork()
    except OSError as error:
        write_frame(control, json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    if interpreter == 0:
        _become_interpreter(pipes, limits, user, scratch, strict)
    Supervisor(control, pipes, interpreter, limits, user, scratch, strict).serve()


def _become_interpreter(
    pipes: list[tuple[int, int]], limits: dict, user: int, scratch: str, strict: bool
) -> NoReturn:
    """Lose all that untrusted code must not have, then execute what comes."""
    (stdin, _), (_, stdout), (_, stderr), (commands, _), (_, reports) = pipes
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        sandbox_walls.die_with_parent()
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, number)
        first, second = sorted((commands, reports))
        os.closerange(3, first)
        os.closerange(first + 1, second)
        os.closerange(second + 1, 1024)
        sandbox_walls.limit_resources(limits, strict)
        if strict:
            sandbox_walls.drop_privileges(user)
        interpreter = Interpreter(commands, reports, limits)
        if not strict:
            refuse_events(scratch)
    except (OSError, ValueError) as error:
        write_frame(reports, b"x" + str(error).encode())
        os._exit(1)
    write_frame(reports, b"o")
    interpreter.serve()
    os._exit(0)
