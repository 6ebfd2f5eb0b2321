"""The command of sweeps: signals, and two runs in earnest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "runs" / "stand_in.py"


def start(out: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    """The command, in a process group of its own, as a terminal would have it."""
    given = ["--config", "configs/tiny_moe.py:test", f"--out={out}", *map(str, arguments)]
    return subprocess.Popen(
        [sys.executable, "experiments/sweep.py", *given],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=600)
    return process.returncode, out


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path.read_text()


@pytest.fixture
def waiting(tmp_path):
    """A sweep of stand-ins whose second run waits to be stopped."""
    (tmp_path / "told.json").write_text(json.dumps({"rank=8/seed=0": "wait"}))
    process = start(tmp_path, "--run", STAND_IN, "--seeds=0", "--grid=adapter.rank=4,8,16")
    wait_for(tmp_path / "ready.txt")
    return tmp_path, process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_run_save_itself_and_the_same_command_goes_on(waiting, number):
    out, process = waiting
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C reaches all of a terminal
    else:
        process.send_signal(number)
    status, said = end(process)
    assert status == 130, said
    assert "stopped; go on with:\n" in said
    assert "unfinished: rank=8/seed=0\n" in said
    assert "waiting: rank=16/seed=0\n" in said
    (out / "told.json").unlink()
    status, said = end(start(out, *process.args[5:]))
    assert status == 0, said
    begun = (out / "started.txt").read_text().splitlines()
    assert begun == [f"rank={rank}/seed=0 from 0" for rank in (4, 8)] + [
        "rank=8/seed=0 from 1",
        "rank=16/seed=0 from 0",
    ]
    cells = json.loads((out / "sweep.json").read_text())["cells"]
    assert {cell["state"] for cell in cells} == {"finished"}
    assert (out / "sweep.png").stat().st_size > 10_000


def test_a_run_that_outlives_its_sweep_keeps_another_away(waiting):
    out, process = waiting
    process.kill()
    process.wait()
    process.stdout.close()  # its run, which holds the other end, goes on
    status, said = end(start(out, *process.args[5:]))
    assert status == 2, said
    assert "another process is writing" in said
    os.kill(int((out / "ready.txt").read_text()), signal.SIGTERM)
    (out / "told.json").write_text(json.dumps({"rank=16/seed=0": "fail"}))
    deadline = time.monotonic() + 60
    status = 2
    while status == 2 and time.monotonic() < deadline:  # until it has saved itself
        status, said = end(start(out, *process.args[5:]))
    assert status == 1, said
    assert "failed: rank=16/seed=0: status 2: error: config.base.path: it is not there" in said


@pytest.mark.long
def test_two_runs_in_earnest(tmp_path, compiled_programs):
    given = ["--config.steps=1", "--seeds=0,1", "--grid=optimizer.learning_rate=1e-3"]
    given += [f"--config.run.root={tmp_path}"]
    shared = {"JAX_COMPILATION_CACHE_DIR": str(compiled_programs)}
    status, said = end(start(tmp_path / "sweep", *given, **shared))
    assert status == 0, said
    assert "goes on after" not in said
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    (row,) = found["settings"]
    assert (row["setting"], row["seeds"]) == ("learning_rate=0.001", [0, 1])
    assert row["measures"]["parity_max_abs_diff"]["values"] == [0.0, 0.0]
    assert row["measures"]["gain"]["low"] is not None
    folder = tmp_path / "sweep" / "learning_rate=0.001" / "seed=1"
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["optimizer"]["learning_rate"]) == (1, 0.001)
    assert "--config.seed=1" in json.loads((folder / "environment.json").read_text())["command"]
    assert "ppo_math.py" in said
