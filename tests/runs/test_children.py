"""Processes of one's own: what they say, how they end, and what a signal does."""

import os
import signal
import sys
import threading
import time

import pytest

from orbit_jax.runs.children import Children

WAITING = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
pathlib.Path(sys.argv[1]).write_text("")
time.sleep(100)
"""

ASKING = """
import pathlib, sys, time
print("first", file=sys.stderr)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


@pytest.fixture
def children(tmp_path):
    with (tmp_path / "lock").open("w") as lock, Children(lock) as found:
        yield found


@pytest.fixture
def run(children, tmp_path):
    """Runs Python code in a child."""

    def one(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return children.run(command, tmp_path / "errors.txt")

    return one


def test_the_end_of_a_child_is_told_with_its_sentence(run, capfd):
    assert run("print('fine')") == ""
    failing = "import sys; print('error: no', file=sys.stderr); sys.exit('more')"
    assert run(failing) == "status 1: error: no"
    assert run("1 / 0") == "status 1: ZeroDivisionError: division by zero"
    assert run("raise SystemExit(3)") == "status 3: it said nothing"
    assert run("import os; os.kill(os.getpid(), 9)") == "killed by SIGKILL"
    out, errors = capfd.readouterr()
    assert "fine" in out
    assert "error: no\nmore\n" in errors


def test_errors_are_passed_on_as_they_come_and_kept(run, tmp_path, monkeypatch):
    def answer(text):
        if "first" in text:
            (tmp_path / "heard").write_text("")

    monkeypatch.setattr(sys.stderr, "write", answer)
    assert run(ASKING, tmp_path / "heard") == ""
    assert (tmp_path / "errors.txt").read_text() == "first\n"


def test_a_child_is_told_to_end_and_awaited(run, children, tmp_path):
    def end():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert run(WAITING, tmp_path / "ready", 7) == "status 7: it said nothing"
    assert children.stop


def test_ctrl_c_is_left_to_the_child_and_ends_nothing_here(run, children):
    os.kill(os.getpid(), signal.SIGINT)
    assert children.stop
    # One that is started all the same is told at once.
    assert run("import time; time.sleep(100)") == "killed by SIGTERM"


def test_handlers_come_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with (tmp_path / "lock").open("w") as lock, Children(lock):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_workers_that_outlive_a_child_are_not_awaited(run):
    worker = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
    worker += "'import time; time.sleep(20)'])"
    began = time.monotonic()
    assert run(worker) == ""
    assert time.monotonic() - began < 15
