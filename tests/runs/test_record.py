"""What the recorder counts as a step's time and as the run's, by a clock of its own."""

from pathlib import Path

import numpy as np
import pytest

from orbit_jax.runs import record as module
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.record import Recorder

FACTS = {"base_hash": "abc", "base_bytes": 1, "adapter_bytes": 1}
METRICS = {"tokens": 50, "parity/tokens": 20, "parity/max_abs_diff": 0.0}


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def recipe(root: Path, steps: int) -> dict:
    run = {"root": str(root), "samples_every_steps": 10, "keep_checkpoints": 2}
    return {"experiment": "x", "seed": 0, "steps": steps, "run": run}


def go_on(record: Recorder, clock: Clock, start: int, steps: int) -> dict:
    """Start-up of 1000 s; steps of 5 s, each followed by an evaluation and a save of 70 s."""
    clock.now += 1000
    for step in record.timed(range(start, steps)):
        clock.now += 5
        record.check(step, METRICS, batch=None, recipe="fast")
        clock.now += 60
        record.step(step, METRICS, np.ones(2), ["scored"] * 2, samples=[])
        record.checkpoint(step + 1, {"x": np.zeros(1)})
        clock.now += 10
    return record.after({"heldout/pass_greedy": 0.5})


def test_a_step_is_timed_without_start_up_and_evaluations(tmp_path: Path, clock: Clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore({"x": np.zeros(1)})
        summary = go_on(record, clock, 0, 2)
    rows = [r for r in read_metrics(record.folder.path) if "tokens" in r]
    assert [r["seconds/step"] for r in rows] == [5, 5]
    assert [r["tokens_per_second"] for r in rows] == [10, 10]
    assert summary["tokens_per_second"] == 10
    assert summary["seconds"] == 1000 + 2 * 75


def test_a_resumed_run_counts_on(tmp_path: Path, clock: Clock):
    with Recorder(recipe(tmp_path, 1), FACTS) as record:
        record.restore({"x": np.zeros(1)})
        go_on(record, clock, 0, 1)
    with Recorder(recipe(tmp_path, 2), FACTS, resume=str(record.folder.path)) as record:
        _, start = record.restore({"x": np.zeros(1)})
        assert start == 1
        summary = go_on(record, clock, start, 2)
    assert summary["tokens_per_second"] == 10
    assert summary["parity_tokens"] == 40
    # Time after the newest checkpoint is not known to who goes on from it.
    assert summary["seconds"] == (1000 + 65) + (1000 + 75)
