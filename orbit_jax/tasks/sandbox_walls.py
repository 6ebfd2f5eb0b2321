"""The walls of the sandbox: kernel namespaces, capabilities, seccomp and resource limits.

Imported by the sandbox's own processes, by path: standard library alone, single-threaded. `strict`
isolation is made of Linux namespaces that need no privilege and no helper program: a process there
has no network, sees only its own processes, and a file system of read-only interpreter files and an
empty scratch folder in memory. Then it loses every capability, and seccomp refuses the system calls
that widen what it can reach. `weak` isolation has resource limits and Python's audit hooks only:
they stop a careless program, not a determined one.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

from sandbox_filters import CALLS, MACHINES, NEW_NAMESPACE, seccomp_program

SCRATCH = "/tmp"  # as the program sees it
OPEN_FILES = 64  # also bounds what can hide in the kernel's buffers
_UNUSED_USERS = 0x70000000  # where the machine has all user ids: nobody's, one for each sandbox
_NOBODY = 65534

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_ATTRIBUTE_READ_ONLY, _ATTRIBUTE_NOSUID, _ATTRIBUTE_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 24, 36, 38

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on processes that lose their parent below this one become its children (Linux)."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespaces() -> int:
    """Leave the users, mounts, network and processes of the machine; a child is the first inside.

    Returns the user id for the untrusted process: this process's own, or, where that is root's, one
    that owns nothing.

    Raises:
      OSError: when the machine does not allow it, saying what it refused.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"{sys.platform} on {platform.machine()} has no known namespaces")
    own, group, me = os.geteuid(), os.getegid(), os.getpid()
    user = _user_beside_root(me) if own == 0 else own
    maps = {"uid_map": f"{own} {own} 1\n", "gid_map": f"{group} {group} 1\n"}
    if own == 0:
        maps = {name: text + f"{user} {user} 1\n" for name, text in maps.items()}
    else:
        maps = {"setgroups": "deny", **maps}
    # Only a process that stays outside may say who is who inside.
    left, leave = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(leave)
            if os.read(left, 1):
                for name, text in maps.items():
                    with open(f"/proc/{me}/{name}", "w") as file:
                        file.write(text)
                os._exit(0)
        finally:
            os._exit(1)
    os.close(left)
    try:
        _call("a namespace of users", _libc.unshare, NEW_NAMESPACE["user"])
        os.write(leave, b"x")
    finally:
        os.close(leave)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        raise OSError("mapping users into a namespace was refused")
    others = sum(flag for name, flag in NEW_NAMESPACE.items() if name != "user")
    _call("namespaces of mounts, network and processes", _libc.unshare, others)
    return user


def build_root(user: int, scratch_bytes: int) -> None:
    """Put this process on a file system of its own; called by the first process in a namespace."""
    shown = [(path, os.open(path, os.O_PATH)) for path in _interpreter_paths()]
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    shown_devices = [(path, os.open(path, os.O_PATH)) for path in devices]
    root = SCRATCH  # any folder that exists serves to build on; what it held goes out of sight
    hidden = _MS_NOSUID | _MS_NODEV
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", hidden, "size=1m,mode=0755")
    os.mkdir(root + "/proc")
    # With no way to /proc/sys and the like, and none to processes of other users.
    options = "subset=pid,hidepid=invisible"
    _mount("proc", root + "/proc", "proc", hidden | _MS_NOEXEC, options)
    os.mkdir(root + SCRATCH)
    group = os.getegid() if user == os.geteuid() else user
    options = f"size={scratch_bytes},nr_inodes=4096,mode=0700,uid={user},gid={group}"
    _mount("tmpfs", root + SCRATCH, "tmpfs", hidden, options)
    for path, descriptor in shown:
        attributes = _ATTRIBUTE_READ_ONLY | _ATTRIBUTE_NOSUID | _ATTRIBUTE_NODEV
        _show(descriptor, root + path, attributes)
    for path, descriptor in shown_devices:
        _show(descriptor, root + path, _ATTRIBUTE_NOSUID)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", root + "/dev/fd")
    _set_attributes(root, 0, _ATTRIBUTE_READ_ONLY)
    os.chdir(root)
    _system_call("pivot_root", b".", b".")
    _call("leaving the old root", _libc.umount2, b".", _MNT_DETACH)
    os.chdir(SCRATCH)
    _libc.sethostname(b"sandbox", 7)


def drop_privileges(user: int) -> None:
    """Become `user`, without capabilities or a way to any, and under seccomp."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _system_call("capset", header, none)
    _call("no new privileges", _libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or it could not read its own /proc/self
    program = seccomp_program(platform.machine())
    memory = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
    _call("seccomp", _libc.prctl, _PR_SET_SECCOMP, 2, header, 0, 0)
    os.listdir(os.path.dirname(os.__file__))  # it must be able to import


def limit_resources(limits: dict, strict: bool) -> None:
    """Set the limits that the kernel keeps for each process."""
    values = {
        "RLIMIT_CORE": 0,
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if strict:  # counted within the namespace; elsewhere it would count all of the user's processes
        values["RLIMIT_NPROC"] = limits["processes"] + 2  # the sandbox's own two may count
    for name, value in values.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            if strict:
                raise  # other systems lack some
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # a machine short of memory takes it before anyone else


def _user_beside_root(process: int) -> int:
    with open("/proc/self/uid_map") as file:
        inside, _, count = map(int, file.readline().split())
    return _UNUSED_USERS + process if (inside, count) == (0, 0xFFFFFFFF) else _NOBODY


def _interpreter_paths() -> list[str]:
    """What the program sees of the machine: its interpreter, the library, shared objects."""
    paths = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    paths += [sys.base_prefix + "/lib", *sys.path, sys.executable]
    shown: list[str] = []
    for path in paths:
        if os.path.exists(path) and not any((path + "/").startswith(p + "/") for p in shown):
            shown.append(path)
    return shown


def _show(descriptor: int, target: str, attributes: int) -> None:
    """Mount what a descriptor stands for at a path that is made for it."""
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "x"):
            pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _set_attributes(target, _AT_RECURSIVE, attributes)
    os.close(descriptor)


def _set_attributes(path: str, flags: int, attributes: int) -> None:
    what = struct.pack("@QQQQ", attributes, 0, 0, 0)
    _system_call("mount_setattr", _AT_FDCWD, path.encode(), flags, what, len(what))


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    _call(f"mounting {target}", _libc.mount, *encoded, ctypes.c_ulong(flags), options.encode())


def _system_call(name: str, *arguments: int | bytes) -> None:
    number = CALLS[name][MACHINES[platform.machine()][0]]
    _call(name, _libc.syscall, number, *arguments)


def _call(what: str, function, *arguments) -> None:
    if function(*arguments) < 0:
        raise OSError(f"{what} was refused ({os.strerror(ctypes.get_errno())})")
