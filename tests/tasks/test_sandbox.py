import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hostile_programs import HOSTILE

from orbit_jax.tasks import sandbox_link
from orbit_jax.tasks.sandbox import Limits, Outcome, Program, Sandbox

LIMITS = Limits(
    wall_seconds=2.5,
    cpu_seconds=0.8,
    memory_bytes=256 << 20,
    processes=16,
    file_bytes=1 << 20,
    scratch_bytes=4 << 20,
    output_bytes=64 << 10,
)
SECRET = "the-parent-s-secret"


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What hostile programs look for: a secret in a file and the environment, and open sockets."""
    secret_file = tmp_path_factory.mktemp("outside") / "secret.txt"
    secret_file.write_text(SECRET)
    abstract = f"sandbox-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        if sys.platform == "linux":
            local.bind("\0" + abstract)
            local.listen()
        names = {"secret_file": str(secret_file), "parent": os.getpid(), "abstract": abstract}
        names["port"] = server.getsockname()[1]
        server.setblocking(False)
        yield names, server


@pytest.fixture(scope="module")
def sandbox(outside):
    os.environ["SECRET"] = SECRET
    try:
        with Sandbox(workers=2, limits=LIMITS) as sandbox:
            yield sandbox
    except ValueError as error:
        if "namespace of users was refused" not in str(error):
            raise
        pytest.skip(str(error))
    finally:
        del os.environ["SECRET"]


def processes_inside(sandbox):
    """By process id, the namespace of every process that untrusted code can have started."""
    found = {}
    for worker in alive(sandbox):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            below = psutil.Process(worker.process.pid).children(recursive=True)
            found |= {process.pid: namespace(process.pid) for process in below}
    return {pid: space for pid, space in found.items() if space != namespace("self")}


def alive(sandbox):
    return [worker for worker in sandbox._live if worker.process.poll() is None]


def namespace(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it ended just now
        return os.readlink("/proc/self/ns/pid")


def left_behind(namespaces):
    """Processes in these namespaces that no worker has below it; numbers of namespaces recur."""
    return {
        pid
        for pid in psutil.pids()
        if namespace(pid) in namespaces and not belongs_to_a_worker(pid)
    }


def belongs_to_a_worker(pid):
    try:
        above = psutil.Process(pid).parents()
        return any("sandbox_worker" in " ".join(process.cmdline()) for process in above)
    except psutil.NoSuchProcess:
        return True  # it ended just now


def kill_workers(sandbox):
    for worker in alive(sandbox):
        below = psutil.Process(worker.process.pid).children(recursive=True)
        os.kill(worker.process.pid, signal.SIGKILL)
        assert psutil.wait_procs(below, timeout=10)[1] == []


def comes_true(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def ready(sandbox):
    """Wait for a supervisor and an interpreter below each worker."""
    return comes_true(lambda: len(processes_inside(sandbox)) == 2 * len(alive(sandbox)))


@pytest.mark.parametrize("hostile", HOSTILE, ids=[hostile.name for hostile in HOSTILE])
def test_a_hostile_program_is_contained_and_the_next_one_works(sandbox, outside, hostile):
    names, server = outside
    code = hostile.code.format_map(names) if "{" in hostile.code else hostile.code
    assert ready(sandbox)
    namespaces = set(processes_inside(sandbox).values())
    started = time.monotonic()
    outcome = sandbox.run(code)
    assert time.monotonic() - started < LIMITS.wall_seconds + 5.0
    assert outcome.status in hostile.statuses, outcome
    assert hostile.prints in outcome.stdout
    assert "GOT" not in outcome.stdout
    assert SECRET not in outcome.stdout + outcome.stderr
    assert len(outcome.stdout) + len(outcome.stderr) <= LIMITS.output_bytes + 200
    with pytest.raises(BlockingIOError):
        server.accept()
    assert Path(names["secret_file"]).read_text() == SECRET
    assert comes_true(lambda: not left_behind(namespaces))
    following = sandbox.run("print(sum(map(int, input().split())))", stdin="1 2\n")
    assert (following.status, following.stdout) == ("ok", "3\n")


def test_there_are_at_least_thirty_hostile_programs():
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE) >= 30


def test_a_program_runs_as_a_program_does(sandbox):
    code = (
        """
import atexit, dataclasses, json, sys
from __future__ import annotations
""".replace("from __future__ import annotations\n", "")
        + """
atexit.register(print, "at exit")
@dataclasses.dataclass
class Point:
    x: int
if __name__ == "__main__":
    print(Point(1), open("data/in.txt").read(), sys.stdin.readlines(), __file__)
    sys.stderr.write("a warning")
    sys.exit("bad")
"""
    )
    outcome = sandbox.run(code, stdin="a\nb", files={"data/in.txt": "\u00fc"})
    assert outcome.status == "error"
    assert outcome.stdout == "Point(x=1) \u00fc ['a\\n', 'b'] /tmp/program.py\nat exit\n"
    assert outcome.stderr == "a warningbad\n"
    assert sandbox.run("exit()").status == "ok"
    assert sandbox.run("exit(3)").status == "error"


def test_an_exception_shows_the_program_s_lines_alone(sandbox):
    outcome = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert outcome.status == "error"
    assert "return 1 / 0" in outcome.stderr
    assert "sandbox_" not in outcome.stderr
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_programs_do_not_see_each_other(sandbox):
    assert (
        sandbox.run("open('mine', 'w').write('x')\nimport builtins\nbuiltins.x = 1").status == "ok"
    )
    outcome = sandbox.run("import os\nprint(os.listdir('.'))\nx")
    assert outcome.stdout == "['program.py']\n"
    assert "NameError" in outcome.stderr


def test_long_input_and_output_pass_whole(sandbox):
    text = "0123456789" * 6000
    assert sandbox.run("print(input())", stdin=text).stdout == text + "\n"
    assert sandbox.run("print(len(input()))", stdin=text * 50).stdout == f"{50 * len(text)}\n"


def test_files_outside_the_folder_are_refused(sandbox):
    for name in ("/etc/x", "../x", "a/../../x", "", "a\0b"):
        with pytest.raises(ValueError, match="relative path"):
            sandbox.run("", files={name: "x"})
    with pytest.raises(ValueError, match=r"Limits\.scratch_bytes=4194304"):
        sandbox.run("", files={"x": "x" * (5 << 20)})


def test_many_threads_share_the_workers(sandbox):
    programs = [Program(f"print({i} ** 2)") for i in range(12)]
    results = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: results.update({i: sandbox.run(p.code).stdout}))
        for i, p in enumerate(programs)
    ]
    for thread in threads:
        thread.start()
    batch = sandbox.run_batch(programs)
    for thread in threads:
        thread.join()
    expected = [f"{i * i}\n" for i in range(12)]
    assert [outcome.stdout for outcome in batch] == expected
    assert [results[i] for i in range(12)] == expected
    assert len(sandbox._live) <= 2


def test_cpu_time_is_that_of_all_processes_together():
    code = """
import os, time
children = [os.fork() for _ in range(1)]
while time.process_time() < 0.4: pass
if 0 not in children: os.wait()
"""
    with Sandbox(limits=Limits(wall_seconds=30.0, cpu_seconds=0.6)) as sandbox:
        outcome = sandbox.run(code)
        assert (outcome.status, "CPU limit of 0.6 s" in outcome.stderr) == ("timeout", True)
        assert sandbox.run(code.replace("0.4", "0.2")).status == "ok"


# Sessions

WRITE_EVERYWHERE = """
import os
def write(data):
    for descriptor in range(3, 64):
        try: os.write(descriptor, data)
        except OSError: pass
"""


def test_a_session_keeps_its_variables(sandbox):
    with sandbox.session() as session, sandbox.session() as other:
        assert session.call("import math\nx = 20\ndef f(n): return n + x").status == "ok"
        assert session.call("f(1)").stdout == "21\n"
        failed = session.call("print('so far')\n1 / 0")
        assert (failed.status, failed.stdout) == ("error", "so far\n")
        assert "ZeroDivisionError" in failed.stderr
        assert session.call("x = input()").stderr.endswith("EOFError: EOF when reading a line\n")
        assert session.call("raise SystemExit(2)").status == "error"
        assert session.call("x = None; x").stdout == ""
        assert session.call("print(math.isqrt(f(0) if x else 9))").stdout == "3\n"
        assert "NameError" in other.call("x").stderr
    assert session.call("x").status == "killed"


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("while True: pass", "timeout", "limit of"),
        ("while True: print('x' * 1000)", "output", "65536 bytes"),
        ("import os\nos._exit(0)", "killed", "ended with status 0"),
        ("import os\nos.closerange(0, 100)", "killed", "ended with status"),
        (WRITE_EVERYWHERE + "write(b'\\xff' * 8)", "output", "a value of more than"),
        (WRITE_EVERYWHERE + "write(b'\\0\\0\\0\\3a{}')", "killed", "cannot be read"),
    ],
)
def test_a_call_that_goes_too_far_ends_its_session_and_says_so(sandbox, code, status, why):
    with sandbox.session() as session:
        session.call("x = 1")
        outcome = session.call(code)
        assert (outcome.status, why in outcome.stderr) == (status, True), outcome
        assert session.ended == outcome
        assert session.call("x") == Outcome("killed", stderr=f"the session had ended: {status}")
    assert sandbox.run("print(1)").stdout == "1\n"


def test_nothing_runs_between_calls(sandbox):
    with sandbox.session() as session:
        session.call(
            "import threading, time\nn = 0\ndef count():\n  global n\n"
            "  while True:\n    n += 1\n    time.sleep(0.001)\n"
            "threading.Thread(target=count, daemon=True).start()\ntime.sleep(0.01)"
        )
        before = int(session.call("n").stdout)
        time.sleep(0.3)
        assert int(session.call("n").stdout) - before < 100


def test_more_sessions_than_workers_live_at_once(sandbox):
    sessions = [sandbox.session() for _ in range(4)]
    for i, session in enumerate(sessions):
        session.call(f"x = {i}")
    assert [session.call("x").stdout for session in sessions] == ["0\n", "1\n", "2\n", "3\n"]
    for session in sessions:
        session.close()


# Failures of the sandbox itself


def test_a_worker_that_died_is_replaced(sandbox):
    assert sandbox.run("print(1)").status == "ok"
    kill_workers(sandbox)
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_sandbox_that_dies_in_a_program_is_tried_once_more(sandbox):
    outcomes = []
    code = "import time\ntime.sleep(1)\nprint(1)"
    thread = threading.Thread(target=lambda: outcomes.append(sandbox.run(code)))
    assert ready(sandbox)
    thread.start()
    time.sleep(0.3)
    for pid in processes_inside(sandbox):  # not the worker: what it forked
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    thread.join()
    assert outcomes[0].stdout == "1\n"


def test_a_sandbox_that_cannot_run_is_an_infra_failure(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox_link, "BOOTSTRAP", "raise SystemExit(3)")
    kill_workers(sandbox)
    assert sandbox.run("print(1)").status == "infra_failure"
    with sandbox.session() as session:
        assert session.call("1").status == "infra_failure"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert sandbox.run("print(1)").status == "infra_failure"
    monkeypatch.undo()
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_supervisor_that_hangs_is_an_infra_failure(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox_link, "GRACE_SECONDS", -2.2)
    assert sandbox.run("while True: pass").status == "infra_failure"
    monkeypatch.undo()
    assert sandbox.run("print(1)").stdout == "1\n"


def test_everything_ends_with_the_trainer():
    code = """
import os, threading, time
from orbit_jax.tasks.sandbox import Sandbox
with Sandbox(2) as sandbox:
    threading.Thread(target=sandbox.run, args=("while True: pass",), daemon=True).start()
    session = sandbox.session()
    session.call("import os\\nos.fork() or __import__('time').sleep(60)")
    print(flush=True)
    time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with trainer:
        trainer.stdout.readline()
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert len(below) >= 6
        trainer.kill()
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_closing_ends_what_runs(outside):
    sandbox = Sandbox(limits=LIMITS)
    below = psutil.Process().children(recursive=True)
    outcomes = []
    code = "import time\ntime.sleep(60)"
    thread = threading.Thread(target=lambda: outcomes.append(sandbox.run(code)))
    thread.start()
    time.sleep(0.2)
    sandbox.close()
    thread.join()
    assert outcomes[0].status == "infra_failure"
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run("")
    assert (
        psutil.wait_procs(set(below) - set(psutil.Process().children(recursive=True)), 5)[1] == []
    )


# Settings


def test_a_machine_without_namespaces_is_refused_in_one_sentence(monkeypatch):
    refuse = """
import sandbox_walls
def refuse():
    raise OSError("a namespace of users was refused (Operation not permitted)")
sandbox_walls.enter_namespaces = refuse
import sandbox_worker"""
    bootstrap = sandbox_link.BOOTSTRAP.replace("\nimport sandbox_worker", refuse)
    monkeypatch.setattr(sandbox_link, "BOOTSTRAP", bootstrap)
    with pytest.raises(ValueError, match=r"isolation='strict' cannot .* users was refused.*'weak'"):
        Sandbox()


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"Limits\.wall_seconds=0: it must be a positive number"):
        Limits(wall_seconds=0)
    with pytest.raises(ValueError, match=r"Limits\.memory_bytes=1000000000.0: it must be .* whole"):
        Limits(memory_bytes=1e9)
    with pytest.raises(ValueError, match="workers=0"):
        Sandbox(workers=0)
    with pytest.raises(ValueError, match="isolation='none': use one of strict, weak"):
        Sandbox(isolation="none")


# The weaker mode


@pytest.fixture(scope="module")
def weak():
    with Sandbox(limits=LIMITS, isolation="weak") as sandbox:
        yield sandbox


def test_weak_isolation_is_announced(caplog):
    with Sandbox(limits=LIMITS, isolation="weak") as sandbox:
        assert sandbox.run("print(input())", stdin="x").stdout == "x\n"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "WITHOUT a sandbox" in record.getMessage()


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['id'])",
        "import os\nos.system('id')",
        "import os\nos.kill(os.getppid(), 9)",
        "open({secret_file!r})",
        "open('/etc/passwd')",
        "open(f'/proc/{parent}/environ')",
        "import os\nos.symlink('/etc/passwd', 'x')\nopen('x')",
        "import os\nos.listdir('/')",
        "import os\nos.remove({secret_file!r})",
        "import ctypes",
        "import os\nos.open('/tmp/x', os.O_CREAT | os.O_WRONLY)",
    ],
)
def test_weak_isolation_refuses_what_careless_programs_do(weak, outside, code):
    outcome = weak.run(code.format_map(outside[0]))
    assert outcome.status == "error"
    assert "PermissionError: the sandbox refuses" in outcome.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nos.abort()", "killed"),
        ("import os\nprint('SECRET' in os.environ)\nopen('x', 'w').write('x')", "ok"),
    ],
)
def test_weak_isolation_keeps_limits(weak, code, status):
    outcome = weak.run(code)
    assert (outcome.status, "True" in outcome.stdout) == (status, False), outcome
    assert comes_true(lambda: len(os.listdir(weak._scratch.name)) == 1)  # the next one's


def test_weak_isolation_has_sessions(weak):
    with weak.session() as session:
        assert session.call("x = 1").status == "ok"
        assert session.call("x + 1").stdout == "2\n"


def test_weak_isolation_leaves_no_folder():
    with Sandbox(limits=LIMITS, isolation="weak") as sandbox:
        folder = sandbox._scratch.name
        sandbox.run("open('x', 'w')")
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)
