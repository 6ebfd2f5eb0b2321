"""What is told of a run's steps, once; where it is written, and whom it calls."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from orbit_jax.alerts_config import AlertsConfig
from orbit_jax.runs import alert_command
from orbit_jax.runs.alert_command import AlertCommand
from orbit_jax.runs.alerts import QUIET_STEPS, Alerts
from orbit_jax.runs.files import read_rows
from orbit_jax.runs.metrics import MetricsWriter
from orbit_jax.runs.progress import Progress

FULL, ROOM = {"hardware/disk_free_gb": 0.5}, {"hardware/disk_free_gb": 50.0}


class Run:
    """A run in a folder, or one that goes on from a checkpoint; `lines` is what it told."""

    def __init__(self, folder: Path, checkpoint: Path | None = None, **config):
        self.lines: list[str] = []
        rows, told = (
            read_rows(checkpoint / name) if checkpoint else ()
            for name in ("metrics.jsonl", "alerts.jsonl")
        )
        self.metrics = MetricsWriter(folder, rows)
        self.progress = Progress(9, self.lines.append, console=Console(file=io.StringIO()))
        given = AlertsConfig(**config)
        self.alerts = Alerts(folder, given, self.metrics, self.progress, rows, told)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.alerts.close(error)
        self.metrics.close()

    def steps(self, first: int, *rows: dict) -> None:
        for step, row in enumerate(rows, first):
            row = {"update/applied": 1, **row}
            self.metrics.write(step, row)
            self.alerts.look(step, row)


def told(folder: Path) -> list[tuple[int, str, str]]:
    return [(r["step"], r["rule"], r["state"]) for r in read_rows(folder / "alerts.jsonl")]


def test_an_alert_is_told_when_it_begins_and_when_it_is_over(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, ROOM, FULL, FULL, *[ROOM] * QUIET_STEPS)
        assert told(tmp_path) == [(2, "disk", "begins"), (3 + QUIET_STEPS, "disk", "over")]
    began, over = run.lines
    assert began.startswith("ALERT disk: 0.5 GB are free on the disk of the run folder")
    assert over == f"alert disk: it is over, {QUIET_STEPS + 1} steps after it began"
    (row, _) = read_rows(tmp_path / "alerts.jsonl")
    assert set(row) == {"step", "rule", "state", "message"}
    assert began == f"ALERT disk: {row['message']}"
    assert [text.partition("  ")[2] for text in run.progress._view().alerts] == [began]


def test_a_condition_that_comes_and_goes_is_one_alert(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, *[FULL, ROOM, ROOM] * 5)
    assert told(tmp_path) == [(1, "disk", "begins")]


def test_a_condition_that_comes_back_is_told_again(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, FULL, *[ROOM] * QUIET_STEPS, FULL)
    assert [state for *_, state in told(tmp_path)] == ["begins", "over", "begins"]


def test_a_reading_of_the_machine_stands_until_the_next(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, FULL, *[{}] * (2 * QUIET_STEPS))
        assert told(tmp_path) == [(1, "disk", "begins")]
        # The next reading is all there is, though it lacks what the last one had.
        run.steps(2 + 2 * QUIET_STEPS, {"hardware/host_memory_share": 0.5}, *[{}] * QUIET_STEPS)
    assert [state for *_, state in told(tmp_path)] == ["begins", "over"]


def test_rules_may_be_off(tmp_path):
    with Run(tmp_path, off=("disk",)) as run:
        run.steps(1, FULL | {"parity/max_abs_diff": 0.5})
    assert told(tmp_path) == [(1, "log_prob_gap", "begins")]


def test_what_is_not_finite_is_told_as_it_is_written(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, {"loss/policy": float("nan")})
    assert told(tmp_path) == [(1, "not_finite", "begins")]


def test_alerts_are_texts_of_tensorboard(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, FULL)
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"alerts/disk" in events
    assert b"0.5 GB are free" in events


# A run that is killed and resumed.

HISTORY = [
    *[{"entropy": 0.5, "reward/correctness": 0.4}] * 10,
    *[{"entropy": 0.01, "reward/correctness": 0.4}] * 20,
    *[{"entropy": 0.5, "reward/correctness": 0.4}] * 20,
]


@pytest.mark.parametrize("saved", [5, 21, 22, 30, 34, 38, 49])
@pytest.mark.parametrize("lost", [0, 3, 12])
def test_a_resumed_run_neither_repeats_an_alert_nor_misses_one(tmp_path, saved, lost):
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    with Run(tmp_path / "whole") as run:
        run.steps(1, *HISTORY)
    expected = run.lines
    assert [line.split(":")[0] for line in expected] == [
        "ALERT entropy_collapse",
        "alert entropy_collapse",
    ]
    checkpoint = tmp_path / "checkpoint"
    with Run(tmp_path / "resumed") as run:
        run.steps(1, *HISTORY[:saved])
        shutil.copytree(tmp_path / "resumed", checkpoint)
        run.steps(saved + 1, *HISTORY[saved : saved + lost])
    before = read_rows(checkpoint / "alerts.jsonl")
    with Run(tmp_path / "resumed", checkpoint) as run:
        assert read_rows(tmp_path / "resumed/alerts.jsonl") == before
        run.steps(saved + 1, *HISTORY[saved:])
    assert run.lines == expected[len(before) :]
    whole, resumed = (tmp_path / name / "alerts.jsonl" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_an_evaluation_is_no_step_after_a_resume(tmp_path):
    cut = {"stop/length": 0.6}  # told when ten steps have followed the first ten
    with Run(tmp_path) as run:
        run.metrics.write(0, {"heldout/pass_greedy": 0.3})
        run.steps(1, *[cut] * 15)
    with Run(tmp_path, checkpoint=tmp_path) as run:
        run.steps(16, *[cut] * 10)
    assert told(tmp_path) == [(20, "truncation", "begins")]


def test_the_last_reading_of_the_machine_stands_after_a_resume(tmp_path):
    with Run(tmp_path) as run:
        run.steps(1, FULL)
    with Run(tmp_path, checkpoint=tmp_path) as run:
        run.steps(2, *[{}] * (2 * QUIET_STEPS))
    assert run.lines == []


# The command.


def python(code: str, *arguments: object) -> str:
    return shlex.join([sys.executable, "-c", code, *map(str, arguments)])


COPY = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


def test_the_command_has_each_alert_on_its_standard_input(tmp_path):
    with Run(tmp_path, command=python(COPY, tmp_path / "a file; of 'mine'")) as run:
        run.steps(1, FULL)
    received = json.loads((tmp_path / "a file; of 'mine'").read_text())
    assert [received] == read_rows(tmp_path / "alerts.jsonl")


def test_an_error_that_ends_the_run_is_told_to_the_command(tmp_path):
    out = tmp_path / "out"
    run = Run(tmp_path, command=python(COPY, out))
    run.steps(1, ROOM)
    run.__exit__(ZeroDivisionError, ZeroDivisionError("division by zero"), None)
    received = json.loads(out.read_text())
    assert received["rule"] == "run_ended"
    assert received["step"] == 1
    assert received["message"] == "ZeroDivisionError: division by zero"
    assert told(tmp_path) == []  # log.txt has it; a resumed run goes on as if it had not been


def test_a_user_who_stops_the_run_is_not_told_so(tmp_path):
    run = Run(tmp_path, command=python(COPY, tmp_path / "out"))
    run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not (tmp_path / "out").exists()


def test_a_command_that_hangs_does_not_hold_the_run_and_is_ended(tmp_path, monkeypatch):
    """It, and what it has started."""
    now = 100.0
    monkeypatch.setattr(alert_command, "time", SimpleNamespace(monotonic=lambda: now))
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib; child = subprocess.Popen(['sleep', '600']); "
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(600)"
    )
    with Run(tmp_path, command=python(code, pid), command_seconds=30) as run:
        run.steps(1, FULL, FULL)
        (call,) = run.alerts._command._calls
        assert call.process.poll() is None
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        started = psutil.Process(int(pid.read_text()))
        now += 29
        run.steps(3, FULL)
        assert call.process.poll() is None
        now += 1
        run.steps(4, FULL)
        assert call.process.poll() is not None
        assert run.lines[1:] == ["alerts.command was ended: it took more than 30 s"]
    psutil.wait_procs([started], timeout=10)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE


def test_the_end_of_a_run_waits_for_the_command_no_longer_than_it_may_take():
    lines = []
    command = AlertCommand(python("import time; time.sleep(600)"), 0.2, lines.append)
    command.call({"step": 1})
    command.close()
    assert lines == ["alerts.command was ended: it took more than 0.2 s"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (python("raise ValueError('no such address')"), "status 1: ValueError: no such address"),
        (python("import sys; sys.exit(3)"), "status 3: it said nothing"),
        ("/no/such/program", "could not be started: .*/no/such/program"),
    ],
)
def test_a_command_that_fails_is_told_and_the_run_goes_on(tmp_path, line, sentence):
    with Run(tmp_path, command=line) as run:
        run.steps(1, FULL, FULL)
    (failure,) = run.lines[1:]
    assert re.match(f"alerts.command .*{sentence}", failure), failure
    assert told(tmp_path) == [(1, "disk", "begins")]


def test_a_command_need_not_read():
    lines = []
    command = AlertCommand("true", 60, lines.append)
    command.call({"message": "x" * 1_000_000})
    command.close()
    assert lines == []


def test_nothing_is_started_without_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with Run(tmp_path) as run:
        run.steps(1, FULL)
    assert len(run.lines) == 1
