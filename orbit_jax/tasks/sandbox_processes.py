"""The processes that untrusted code has started, as their supervisor sees them.

Imported by the sandbox's own processes, by path: standard library alone. In a namespace of its own
the supervisor sees no others. Elsewhere it finds them by their parents, and orphans became its
children. A system without /proc shows none: there its direct child alone can be signalled.
"""

import contextlib
import os
import signal
import time
from resource import RUSAGE_CHILDREN, getrusage

KILL_SECONDS = 5.0
_PAGE_BYTES, _CLOCK_TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES, _THREADS = 1, slice(11, 15), 17  # fields of /proc/PID/stat after the name


def usage() -> tuple[float, int, int]:
    """CPU seconds, ended processes included, and threads and bytes of those that live."""
    ended = getrusage(RUSAGE_CHILDREN)
    cpu_seconds, threads, used_bytes = ended.ru_utime + ended.ru_stime, 0, 0
    for process, fields in _below().items():
        try:
            with open(f"/proc/{process}/statm") as file:
                _, resident, shared = file.read().split()[:3]
        except OSError:
            continue  # it ended just now
        cpu_seconds += sum(map(int, fields[_TIMES])) / _CLOCK_TICKS
        threads += int(fields[_THREADS])
        used_bytes += (int(resident) - int(shared)) * _PAGE_BYTES
    return cpu_seconds, threads, used_bytes


def signal_all(number: int, strict: bool, child: int) -> None:
    """Signal all of them; `child` is the direct one."""
    for process in (-1,) if strict else {child, *_below()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def kill_all(strict: bool, child: int) -> None:
    """End all of them and wait until they have ended."""
    deadline = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            signal_all(signal.SIGKILL, strict, child)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def _below() -> dict[int, list[str]]:
    """By process id, the fields of /proc/PID/stat after the name."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                found[int(name)] = file.read().rpartition(")")[2].split()
    below, parents = {}, {os.getpid()}
    while parents:
        children = {
            process: fields
            for process, fields in found.items()
            if int(fields[_PARENT]) in parents and process not in below
        }
        below |= children
        parents = set(children)
    return below
