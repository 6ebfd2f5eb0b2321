"""Programs that a sandbox must contain: name, code, and the outcomes that show that it did.

`{secret_file}`, `{parent}` (a process id), `{port}` and `{abstract}` (sockets that the parent
listens on) are filled in by the test. Where a program tries several ways, it prints `GOT` and what
it got for each that worked: that must never be seen.
"""

from typing import NamedTuple

TRY = """
import os, sys, time, socket, signal
def attempt(function, *args, **kwargs):
    try:
        result = function(*args, **kwargs)
        print("GOT", function, args, repr(result)[:100])
    except Exception as error:
        print("refused", type(error).__name__)
def read(path):
    with open(path, "rb") as file:
        return file.read(1000)
def write(path):
    with open(path, "w") as file:
        file.write("x")
"""
SYSTEM_CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def system_call(*args):  # by the numbers of x86_64
    if os.uname().machine != "x86_64" or libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno())
"""


class Hostile(NamedTuple):
    name: str
    code: str
    statuses: tuple[str, ...]
    prints: str = ""  # a part of its output


HOSTILE = [
    # processes
    Hostile(
        "a fork bomb", TRY + "while True:\n  try: os.fork()\n  except OSError: pass", ("timeout",)
    ),
    Hostile(
        "children that sleep",
        TRY + "n = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(60)\n"
        "except OSError: print('stopped', n < 30)",
        ("ok",),
        "stopped True",
    ),
    Hostile(
        "many threads",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        ("error", "memory"),
    ),
    Hostile(
        "a daemon by double fork and setsid",
        TRY + "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.closerange(0, 64)\n"
        "    while True: pass\n  os._exit(0)\nprint('left')",
        ("ok",),
        "left",
    ),
    Hostile(
        "a daemon that holds the output open",
        TRY + "if os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\n"
        "print('left', flush=True)\nos._exit(0)",
        ("ok",),
        "left",
    ),
    Hostile(
        "a thread that outlives the program",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        ("timeout",),
    ),
    Hostile(
        "another interpreter",
        TRY + "os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'while True: pass'])",
        ("timeout",),
    ),
    Hostile("a shell", TRY + "print(os.system('id') != 0)", ("ok",), "True"),
    # time
    Hostile("an endless loop", "while True: pass", ("timeout",)),
    Hostile("sleeping forever", "import time\nwhile True: time.sleep(1000)", ("timeout",)),
    Hostile("a tower of powers", "print(9 ** 9 ** 9)", ("timeout", "memory")),
    Hostile("a regular expression", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ("timeout",)),
    Hostile(
        "ignoring every signal",
        TRY + "for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\nwhile True: pass",
        ("timeout",),
    ),
    Hostile("stopping itself", TRY + "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    Hostile("a pipe that nobody opens", TRY + "os.mkfifo('p')\nopen('p')", ("timeout",)),
    Hostile(
        "two processes that share the work",
        TRY + "os.fork()\nend = time.process_time() + 0.7\nwhile time.process_time() < end: pass\n"
        "time.sleep(60)",
        ("timeout",),
    ),
    # memory
    Hostile("a memory hog", "x = bytearray(1 << 40)", ("memory",)),
    Hostile("memory bit by bit", "x = []\nwhile True: x.append(bytearray(1 << 20))", ("memory",)),
    Hostile(
        "memory of many processes",
        TRY
        + "for _ in range(8):\n  if os.fork() == 0: break\nx = b'x' * (60 << 20)\ntime.sleep(60)",
        ("memory",),
    ),
    Hostile(
        "a zip bomb",
        "import zlib\nz = zlib.compressobj(1)\n"
        "d = b''.join(z.compress(bytes(1 << 20)) for _ in range(99))\n"
        "zlib.decompress(d + z.flush(), bufsize=99 << 20) * 9",
        ("memory", "timeout"),
    ),
    Hostile(
        "a pickle bomb",
        "import pickle\npickle.loads(b\"cos\\nsystem\\n(S'echo GOT'\\ntR.\")\n"
        "pickle.loads(b'\\x80\\x04\\x8e' + (1 << 40).to_bytes(8, 'little') + b'x')",
        ("error", "memory"),
    ),
    Hostile(
        "memory that is no process's",
        TRY
        + SYSTEM_CALL
        + "attempt(system_call, 319, b'x', 0)\nattempt(system_call, 29, 0, 1 << 30, 0o1600)\n"
        "attempt(write, '/dev/shm/x')",
        ("ok",),
        "refused",
    ),
    Hostile(
        "raising its limits",
        TRY + "import resource\nfor name in ('AS', 'NPROC', 'FSIZE', 'CPU', 'NOFILE'):\n"
        "  attempt(resource.setrlimit, getattr(resource, 'RLIMIT_' + name), (1 << 40, 1 << 40))",
        ("ok",),
        "refused",
    ),
    Hostile(
        "deep recursion",
        "import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()",
        ("killed", "memory", "timeout", "error"),
    ),
    Hostile("a deep literal", "eval('[' * 100000 + ']' * 100000)", ("error", "memory", "output")),
    Hostile("a crash", "import ctypes\nctypes.string_at(0)", ("killed",)),
    # output and files
    Hostile("endless output", "while True: print('x' * 1000)", ("output",)),
    Hostile("endless errors", "import sys\nwhile True: sys.stderr.write('x' * 1000)", ("output",)),
    Hostile(
        "a child's endless output",
        TRY + "if os.fork() == 0:\n  while True: os.write(1, b'x' * 1000)\ntime.sleep(60)",
        ("output",),
    ),
    Hostile(
        "a large file",
        "with open('x', 'wb') as f:\n  while True: f.write(bytes(1 << 16))",
        ("error",),
    ),
    Hostile(
        "a full disk",
        "for i in range(1000):\n  with open(str(i), 'wb') as f: f.write(bytes(1 << 19))",
        ("error",),
    ),
    Hostile(
        "a million files",
        "for i in range(1000000): open(str(i), 'x').close()",
        ("error", "timeout"),
    ),
    Hostile(
        "a deep folder", TRY + "while True:\n  os.mkdir('d')\n  os.chdir('d')", ("error", "timeout")
    ),
    Hostile("many open files", "x = [open('x', 'w') for _ in range(10000)]", ("error",)),
    Hostile("closing what is open", TRY + "os.closerange(0, 1000)\nprint('x')", ("ok", "error")),
    Hostile(
        "tricks with stdin",
        TRY + "attempt(os.write, 0, b'x')\nprint(sys.stdin.read() == '', os.read(0, 9))\n"
        "print(open('/dev/stdin').read() == '')",
        ("ok", "error"),
    ),
    # reaching out
    Hostile(
        "the parent's environment",
        TRY + "print(dict(os.environ))\nfor p in ('self', 1, os.getppid(), {parent}):\n"
        "  for name in ('environ', 'cmdline', 'cwd/x', 'root/etc/passwd', 'maps'):\n"
        "    try: print(read(f'/proc/{{p}}/{{name}}'))\n    except OSError: print('refused')",
        ("ok",),
        "refused",
    ),
    Hostile(
        "the parent's files",
        TRY
        + "for path in ({secret_file!r}, '/etc/passwd', '/etc/shadow', '/proc/kcore', '/dev/mem', "
        "'/dev/vda', '/proc/1/root' + {secret_file!r}, '../../..' + {secret_file!r}):\n"
        "  attempt(read, path)\n"
        "print([os.listdir(p) for p in ('/tmp', '/home', '/var', '/work') if os.path.exists(p)])",
        ("ok",),
        "[['program.py']]",
    ),
    Hostile(
        "the parent's memory",
        TRY
        + SYSTEM_CALL
        + "for p in (1, os.getppid(), {parent}):\n  attempt(read, f'/proc/{{p}}/mem')\n"
        "  attempt(system_call, 101, 16, p, 0, 0)\n  attempt(system_call, 310, p, 0, 0, 0, 0, 0)",
        ("ok",),
        "refused",
    ),
    Hostile(
        "its own harness's memory",
        "import gc, sys\nf = sys._getframe()\nwhile f: print(f.f_locals.keys()); f = f.f_back\n"
        "print(str(gc.get_objects())[:10000])",
        ("ok",),
    ),
    Hostile(
        "writing outside",
        TRY + "for path in ('/x', '/etc/x', '/usr/lib/x', '/lib/x', os.__file__ + 'x', "
        "'/proc/sys/kernel/core_pattern', '/proc/1/oom_score_adj', '/dev/x', {secret_file!r}):\n"
        "  attempt(write, path)\n"
        "attempt(os.remove, os.__file__)\nattempt(os.chmod, os.__file__, 0o777)\n"
        "for path in ('/', '/dev', '/usr/lib', os.__file__, sys.executable):\n"
        "  if os.statvfs(path).f_flag & 3 != 3: print('GOT', path)  # read-only, no setuid",
        ("ok",),
        "refused",
    ),
    Hostile(
        "symlinks and hard links",
        TRY + "os.symlink({secret_file!r}, 'a')\nattempt(read, 'a')\nos.symlink('/', 'b')\n"
        "attempt(write, 'b/etc/x')\nattempt(os.link, os.__file__, 'c')\n"
        "os.symlink('/proc/1/fd/3', 'd')\nattempt(read, 'd')",
        ("ok",),
        "refused",
    ),
    Hostile(
        "connections",
        TRY + "import urllib.request\nattempt(socket.create_connection, ('127.0.0.1', {port}), 1)\n"
        "attempt(urllib.request.urlopen, 'http://127.0.0.1:{port}', timeout=1)\n"
        "attempt(socket.getaddrinfo, 'example.com', 80)\n"
        "for family in range(60):\n"
        "  if family != socket.AF_UNIX:\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "      attempt(socket.socket, family, kind)",
        ("ok",),
        "refused",
    ),
    Hostile(
        "a socket of the parent without a path",
        TRY + "s = socket.socket(socket.AF_UNIX)\nattempt(s.connect, chr(0) + {abstract!r})",
        ("ok",),
        "refused",
    ),
    Hostile(
        "signals to everyone",
        TRY + "for p in (1, os.getppid(), {parent}, -{parent}):\n"
        "  for n in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):\n"
        "    try: os.kill(p, n)\n    except OSError: print('refused')\n"
        "for _ in range(10000):\n  try: os.kill(1, signal.SIGCHLD)\n  except OSError: pass\n"
        "attempt(os.kill, -1, signal.SIGKILL)\nos.killpg(0, signal.SIGKILL)",
        ("killed",),
    ),
    Hostile(
        "becoming root, and new namespaces",
        TRY
        + SYSTEM_CALL
        + "attempt(os.setuid, 0)\nattempt(os.setgid, 0)\nattempt(os.chroot, '.')\n"
        "attempt(os.setgroups, [0])\nattempt(os.mknod, 'n', 0o60600, 1)\nattempt(os.nice, -5)\n"
        "for args in ((272, 0x10000000), (272, 0x20000), (165, b'/', b'/tmp', 0, 4096, 0),\n"
        "             (155, b'.', b'.'), (56, 0x10000011, 0, 0, 0, 0), (435, 0, 0), (308, 0, 0),\n"
        "             (166, b'/proc', 2)):\n"
        "  attempt(system_call, *args)\nattempt(socket.sethostname, 'x')",
        ("ok",),
        "refused",
    ),
    Hostile(
        "the kernel's larger surfaces",
        TRY
        + SYSTEM_CALL
        + "for args in ((425, 1, bytes(120)), (321, 0, 0, 0), (323, 1), (250, 0, -3, 0), "
        "(0x40000000 + 39,), (304, 0, 0, 0), (103, 3, 0, 0)):\n  attempt(system_call, *args)",
        ("ok",),
        "refused",
    ),
    Hostile("leaving at once", TRY + "print('lost')\nos._exit(0)", ("ok",)),
    Hostile("aborting", TRY + "os.abort()", ("killed",)),
]
