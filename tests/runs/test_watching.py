"""What the recorder of a run shows where people look: TensorBoard, W&B, the terminal."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from orbit_jax.runs import watch as module
from orbit_jax.runs.progress import Progress
from orbit_jax.runs.record import Recorder

FACTS = {"base_hash": "abc", "base_bytes": 1, "adapter_bytes": 1}
STATE = {"x": np.zeros(1)}
METRICS = {
    "tokens": 50,
    "parity/tokens": 20,
    "parity/max_abs_diff": 0.0,
    "update/applied": 1,
    "update/same_adapter": 1,
    "reward/infra_failures": 0,
}
SAMPLES = [
    {
        "prompt": "1+1",
        "turns": [["assistant", text]],
        "reward": reward,
        "outcome": "scored",
        "sampled": [True],
    }
    for text, reward in (("it is 2", 1.0), ("it is 3", 0.0))
]


class Counterpart:
    """Stands in for W&B's run: the steps that it is told."""

    def __init__(self):
        self.steps, self.closed = [], False

    def log(self, step, numbers):
        self.steps.append(step)

    def close(self):
        self.closed = True


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What a terminal gets of every progress."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(module, "Progress", lambda *a, **b: Progress(*a, **b, console=console))
    return output


def steps_done(root: Path, steps: int, resume: str = "") -> Path:
    """A run, or more of it; its folder."""
    run = {"root": str(root), "samples_every_steps": 2, "keep_checkpoints": 3}
    config = {"experiment": "x", "seed": 0, "steps": steps, "run": run}
    with Recorder(config, FACTS, resume) as record:
        _, start = record.restore(STATE)
        if not record.resumed:
            record.before({"heldout/pass_greedy": 0.25})
        for step in record.timed(range(start, steps)):
            record.check(step, STATE, METRICS, batch=None, recipe="fast")
            record.step(step, METRICS, np.ones(2), ["scored"] * 2, SAMPLES)
            record.checkpoint(step + 1, STATE)
        record.after({"heldout/pass_greedy": 0.5})
    return record.folder.path


def test_tensorboard_has_samples_at_their_interval_and_the_curve_at_the_end(tmp_path, monkeypatch):
    events: list[Event] = []
    monkeypatch.setattr(EventsWriter, "write_event", lambda writer, event: events.append(event))
    steps_done(tmp_path, 4)
    found = [
        (event.step, value.tag)
        for event in events
        for value in event.summary.value
        if value.WhichOneof("value") != "simple_value"
    ]
    samples = [f"samples/{which}/text_summary" for which in ("best", "worst")]
    assert found == [(s, tag) for s in (1, 3) for tag in samples] + [(4, "learning_curve")]


def test_the_terminal_has_a_sample_and_of_a_resumed_run_the_course_of_all(tmp_path, terminal):
    folder = steps_done(tmp_path, 3)
    assert "best of 2, step 1" in terminal.getvalue()
    assert "it is 2" in terminal.getvalue()
    assert re.search(r"held-out greedy .*25\.0%", terminal.getvalue())
    terminal.truncate(0)
    steps_done(tmp_path, 5, resume=str(folder))
    assert f"log-prob gap{' ' * 5}" in terminal.getvalue()
    assert "▁" * 5 in terminal.getvalue()


def test_wandb_has_a_row_a_step_of_the_resumed_run_only_its_own(tmp_path, monkeypatch):
    asked, found = [], []

    def begin(config, folder, tell):
        asked.append((config["experiment"], folder.parent))
        found.append(Counterpart())
        return found[-1]

    monkeypatch.setattr(module.wandb_run, "begin", begin)
    folder = steps_done(tmp_path, 2)
    steps_done(tmp_path, 3, resume=str(folder))
    assert asked == [("x", tmp_path)] * 2
    assert [one.steps for one in found] == [[0, 1, 2, 2], [3, 3]]
    assert all(one.closed for one in found)
