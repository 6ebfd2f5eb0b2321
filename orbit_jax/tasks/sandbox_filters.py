"""What a sandboxed program is refused: system calls by seccomp, Python's events by an audit hook.

Imported by the sandbox's own processes, by path: standard library alone. Seccomp belongs to
`strict` isolation and stands behind its namespaces. The audit hook belongs to `weak` isolation: it
is kept by the very interpreter that it guards, so it stops careless programs, not determined ones.
The filter is spelt out here, as no maintained package makes one without a system library.
"""

import errno
import os
import socket
import struct
import sys
from typing import Any

# Numbers of system calls: x86_64, aarch64. From 424 on they are the same everywhere.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
CALLS = {
    "socket": (41, 198),
    "clone": (56, 220),
    "clone3": (435, 435),
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "capset": (126, 91),
}
_REFUSED_CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # memory that no limit of the process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # other ways round this list, and the kernel's larger surfaces
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "syslog": (103, 116),
    # new namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "quotactl": (179, 60),
}


NEW_NAMESPACE = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # where a filter finds them
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OTHER_CONVENTION = 0x40000000  # x86_64: calls by its 32-bit numbering

_REFUSED_EVENTS = (
    *("subprocess.", "pty.", "ctypes.", "socket.connect", "socket.bind", "socket.sendto"),
    *("socket.sendmsg", "socket.getaddrinfo", "socket.gethostby", "signal.pthread_kill"),
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill"),
    *("resource.prlimit", "gc.get_", "sys._current_frames"),
)
_REFUSED_IMPORTS = ("ctypes", "_ctypes", "_posixsubprocess")
_CHANGING_EVENTS = (
    *("os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"),
)
_READING_EVENTS = ("os.listdir", "os.scandir", "os.chdir")


def seccomp_program(machine: str) -> bytes:
    """The filter for a machine of `MACHINES`, as the kernel reads it: 8 bytes an instruction."""
    column, audit_name = MACHINES[machine]

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def fail(error: int) -> bytes:
        return step(_RETURN, _FAIL | error)

    def refuse(name_numbers: tuple[int, int], error: int) -> bytes:
        return step(_IF_EQUAL, name_numbers[column], 0, 1) + fail(error)

    program = step(_LOAD, _MACHINE) + step(_IF_EQUAL, audit_name, 1, 0) + step(_RETURN, _KILL)
    program += step(_LOAD, _NUMBER)
    program += step(_IF_AT_LEAST, _OTHER_CONVENTION, 0, 1) + fail(errno.ENOSYS)
    for numbers in _REFUSED_CALLS.values():
        program += refuse(numbers, errno.EPERM)
    # Its flags lie in memory, out of a filter's sight; C libraries then fall back to clone.
    program += refuse(CALLS["clone3"], errno.ENOSYS)
    program += step(_IF_EQUAL, CALLS["clone"][column], 0, 4) + step(_LOAD, _FIRST_ARGUMENT)
    program += step(_IF_ANY_BIT, sum(NEW_NAMESPACE.values()), 0, 1) + fail(errno.EPERM)
    program += step(_RETURN, _ALLOW)
    # Some kinds of socket know no namespaces. Those between a program's own processes are left.
    program += step(_IF_EQUAL, CALLS["socket"][column], 0, 4) + step(_LOAD, _FIRST_ARGUMENT)
    program += step(_IF_EQUAL, socket.AF_UNIX, 1, 0) + fail(errno.EACCES)
    return program + step(_RETURN, _ALLOW) + step(_RETURN, _ALLOW)


def refuse_events(scratch: str) -> None:
    """Let this interpreter refuse, from now on, what leaves `scratch` or starts processes."""
    realpath, strings = os.path.realpath, (str, bytes, os.PathLike)
    devices = tuple(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))
    scratch = realpath(scratch)
    readable = tuple(realpath(path) for path in (*sys.path, sys.base_prefix + "/lib"))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def within(path: Any, *folders: str) -> bool:
        if not isinstance(path, strings):
            return True  # a file that is open already
        path = realpath(os.fsdecode(path))
        return any(path == folder or path.startswith(folder + os.sep) for folder in folders)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            allowed = within(path, scratch, *devices)
            allowed = allowed or (not flags & writing and within(path, *readable))
        elif event == "import":
            allowed = arguments[0] not in _REFUSED_IMPORTS
        elif event == "socket.__new__":
            allowed = arguments[1] == socket.AF_UNIX
        elif event in _CHANGING_EVENTS:
            allowed = all(within(path, scratch) for path in arguments if isinstance(path, strings))
        elif event in _READING_EVENTS:
            allowed = within(arguments[0], scratch, *readable)
        else:
            allowed = not event.startswith(_REFUSED_EVENTS)
        if not allowed:
            raise PermissionError(f"the sandbox refuses {event} {arguments!r:.200}")

    for name in (*_REFUSED_IMPORTS, "sandbox_walls"):
        sys.modules.pop(name, None)
    sys.addaudithook(hook)
