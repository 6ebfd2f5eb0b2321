import math
import os
import sys
import threading
import time

import pytest

from orbit_jax.tasks import grading
from orbit_jax.tasks.grading import Grade, Grader, grade

RIGHT, WRONG = Grade(1.0, "scored"), Grade(0.0, "scored")
PARSE_FAILURE = Grade(0.0, "parse_failure")


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


def in_thread(function, *arguments):
    """Run in a thread of its own and return the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()
    thread.join()
    return results[0]


def use_worker(monkeypatch, tmp_path, body):
    """Put a program of the test's own in the worker's place; `connection` is its socket."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import json, os, subprocess, sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "connection = Connection(int(sys.argv[1]))\n" + body
    )
    monkeypatch.setattr(grading, "WORKER_FILE", path)


READY = "connection.send_bytes(json.dumps({'ready': True}).encode())\n"
READ = (
    "connection.recv_bytes()\nconnection.send_bytes(json.dumps({'answer_read': True}).encode())\n"
)


@pytest.mark.parametrize(
    ("box", "answer", "expected"),
    [
        ("1/2", "0.5", RIGHT),
        (r"\frac{1}{2}", "0.5", RIGHT),
        ("0.50", r"\frac12", RIGHT),
        ("\u22127", "-7", RIGHT),
        ("1,000", "1000", RIGHT),
        ("1{,}000", "1,000", RIGHT),
        ("x = 5", "5", RIGHT),
        (r"5\text{ cm}", "5", RIGHT),
        (r"90^\circ", "90", RIGHT),
        ("2 2/3", "8/3", RIGHT),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", WRONG),
        ("1/2^99", "1/2^98", WRONG),
        ("50%", "50", WRONG),
        (r"50\%", "50", WRONG),
        ("50", "50%", WRONG),
        ("2 2/3", "2", WRONG),
        ("2", "2 2/3", WRONG),
        ("0.333333", "1/3", WRONG),
        (r"50\text{ percent}", "50", WRONG),
        ("27 + 35 - 14", "48", PARSE_FAILURE),
        ("x = 27 + 35 - 14", "48", PARSE_FAILURE),
        ("48, 49", "48", PARSE_FAILURE),
    ],
)
def test_plain_numbers_are_compared_exactly(box, answer, expected):
    assert grade(rf"\boxed{{{box}}}", answer) == expected


def test_the_last_balanced_box_counts_and_two_boxes_are_no_set():
    assert grade(r"\boxed{1} and \boxed{2}", "2") == RIGHT
    assert grade(r"\boxed{1} and \boxed{2}", "1") == WRONG
    assert grade(r"\boxed{1} and \boxed{2}", r"\{1, 2\}") != RIGHT


def test_an_answer_cut_off_inside_its_box_does_not_score():
    assert grade(r"\boxed{48", "48") == PARSE_FAILURE
    assert grade(r"\boxed{48} wait, \boxed{4", "48") == PARSE_FAILURE


@pytest.mark.parametrize(
    ("box", "answer", "expected"),
    [
        ("(x+1)^2", "x^2+2x+1", RIGHT),
        (r"0.1\pi", r"\frac{\pi}{10}", RIGHT),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}", RIGHT),
        ("2", r"\sqrt{4}", RIGHT),
        ("1{,}000x", "1000x", RIGHT),
        (r"\{2, 1\}", r"\{1, 2\}", RIGHT),
        ("(1,2)", r"\{1,2\}", WRONG),
        ("[0,1]", "[0,1)", WRONG),
        (r"50\%x", "50x", WRONG),
        (r"\frac{\sqrt{2}}{2^{99}}", r"\frac{\sqrt{2}}{2^{98}}", WRONG),
        ("3.14159265", r"\pi", WRONG),
        ("Monday", "Tuesday", WRONG),
        ("Tuesday", "Tuesday", RIGHT),
        ("((((", "x", PARSE_FAILURE),
    ],
)
def test_symbolic_answers_are_graded_by_the_worker(grader, box, answer, expected):
    assert grader.grade(rf"\boxed{{{box}}}", answer) == expected


def test_grades_from_a_thread(grader):
    assert in_thread(grade, r"\boxed{1/2}", "0.5") == RIGHT
    assert in_thread(grader.grade, r"\boxed{(x+1)^2}", "x^2+2x+1") == RIGHT


def test_a_batch_keeps_its_order_over_several_workers():
    pairs = [(rf"\boxed{{x+{i % 3}}}", "1+x") for i in range(9)] + [(r"\boxed{3}", "3"), ("", "3")]
    with Grader(workers=2) as grader:
        grades = grader.grade_batch(pairs)
    assert grades == [WRONG, RIGHT, WRONG] * 3 + [RIGHT, PARSE_FAILURE]


def test_no_process_starts_for_plain_numbers(monkeypatch):
    monkeypatch.setattr(grading.subprocess, "Popen", None)
    assert grade(r"\boxed{48}", "48") == RIGHT


def test_a_tower_of_powers_returns_within_the_limit_and_the_worker_is_replaced():
    tower = r"\boxed{9^{9^{9^{9}}}}"
    assert grade(tower, "5") == PARSE_FAILURE
    with Grader(max_seconds=1.0) as grader:
        assert grader.grade(r"\boxed{1+x}", "x+1") == RIGHT
        first = grader._workers[0].process
        started = time.monotonic()
        assert grader.grade(tower, r"\pi") == PARSE_FAILURE
        assert time.monotonic() - started < 20
        assert first.returncode == -9
        assert grader.grade(r"\boxed{1+x}", "x+1") == RIGHT


def test_a_late_worker_dies_with_everything_it_started(monkeypatch, tmp_path):
    body = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
{READY}{READ}
while True: pass
"""
    use_worker(monkeypatch, tmp_path, body)
    with Grader(max_seconds=0.3) as grader:
        assert in_thread(grader.grade, r"\boxed{x}", "y") == PARSE_FAILURE
    assert process_is_gone(int((tmp_path / "pid").read_text()))


def process_is_gone(pid):
    """Wait for the end of a killed process; a zombie that nobody reaps counts as ended."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except ProcessLookupError:
            return True
        except FileNotFoundError:
            pass  # it ended just now, or this system has no /proc
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("sys.exit(3)", id="ends while starting"),
        pytest.param('connection.send_bytes(b\'{"error": "no sympy"}\')', id="cannot import"),
        pytest.param(READY + READ + "os.abort()", id="crashes while grading"),
        pytest.param(
            READY + "connection.recv_bytes(); time.sleep(60)", id="hangs on the reference"
        ),
    ],
)
def test_a_failure_of_the_grader_is_not_scored(monkeypatch, tmp_path, body):
    use_worker(monkeypatch, tmp_path, body)
    with Grader(max_seconds=0.3) as grader:
        for _ in range(2):
            result = grader.grade(r"\boxed{x}", "y")
            assert result.outcome == "infra_failure"
            assert math.isnan(result.value)


def test_an_interpreter_that_does_not_exist_is_not_scored(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Grader() as grader:
        assert grader.grade(r"\boxed{x}", "y").outcome == "infra_failure"


def test_a_worker_that_died_while_idle_is_replaced():
    with Grader() as grader:
        assert grader.grade(r"\boxed{1+x}", "x+1") == RIGHT
        grader._workers[0].process.kill()
        assert grader.grade(r"\boxed{1+x}", "x+1") == RIGHT


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="workers=0"):
        Grader(workers=0)
