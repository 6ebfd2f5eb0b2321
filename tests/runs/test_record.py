"""What the recorder counts as a step's time and as the run's, by a clock of its own."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.model.stream import Stream
from orbit_jax.rl.batch import Batch
from orbit_jax.runs import record as module
from orbit_jax.runs.files import read_rows
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.record import Recorder

BATCH_FIELDS = (
    *("sampled", "scored", "logprobs", "rewards", "groups", "truncated", "temperature"),
    "fingerprint",
)
FACTS = {"base_hash": "abc", "base_bytes": 1, "adapter_bytes": 1}
METRICS = {
    "tokens": 50,
    "parity/tokens": 20,
    "parity/max_abs_diff": 0.0,
    "update/applied": 1,
    "update/same_adapter": 1,
    "reward/infra_failures": 0,
}
STATE = {"x": np.zeros(1)}
BATCH = Batch(
    stream=Stream(*np.zeros((3, 2, 8), np.int32), num_rows=2, num_slots=8),
    **dict.fromkeys(BATCH_FIELDS, np.zeros(1)),
    num_groups=2,
)


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
    run = {"root": str(root), "samples_every_steps": 10, "keep_checkpoints": 3}
    return {"experiment": "x", "seed": 0, "steps": steps, "run": run}


def go_on(record: Recorder, clock: Clock, start: int, steps: int) -> dict:
    """Start-up of 1000 s; steps of 5 s, each followed by an evaluation and a save of 70 s."""
    clock.now += 1000
    for step in record.timed(range(start, steps)):
        clock.now += 5
        record.check(step, STATE, METRICS, batch=None, recipe="fast")
        clock.now += 60
        record.step(step, METRICS, np.ones(2), ["scored"] * 2, samples=[])
        record.checkpoint(step + 1, STATE)
        clock.now += 10
    return record.after({"heldout/pass_greedy": 0.5})


def test_a_step_is_timed_without_start_up_and_evaluations(tmp_path: Path, clock: Clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore(STATE)
        summary = go_on(record, clock, 0, 2)
    rows = [r for r in read_metrics(record.folder.path) if "tokens" in r]
    assert [r["seconds/step"] for r in rows] == [5, 5]
    assert [r["tokens_per_second"] for r in rows] == [10, 10]
    assert summary["tokens_per_second"] == 10
    assert summary["seconds"] == 1000 + 2 * 75


def test_a_resumed_run_counts_on(tmp_path: Path, clock: Clock):
    with Recorder(recipe(tmp_path, 1), FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 1)
    with Recorder(recipe(tmp_path, 2), FACTS, resume=str(record.folder.path)) as record:
        _, start = record.restore(STATE)
        assert start == 1
        summary = go_on(record, clock, start, 2)
    assert summary["tokens_per_second"] == 10
    assert summary["parity_tokens"] == 40
    # Time after the newest checkpoint is not known to who goes on from it.
    assert summary["seconds"] == (1000 + 65) + (1000 + 75)


def test_a_run_is_saved_once_a_step_and_ends_where_the_last_is_saved_already(tmp_path, clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 2)
        record.checkpoint(2, STATE)
    with Recorder(recipe(tmp_path, 2), FACTS, resume=str(record.folder.path)) as record:
        _, start = record.restore(STATE)
        assert start == 2
        record.checkpoint(2, STATE)
        assert record.after({"heldout/pass_greedy": 0.5})["finished"]


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path, clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore(STATE)
        with pytest.raises(ValueError, match="another process is writing"):
            Recorder(recipe(tmp_path, 2), FACTS, resume=str(record.folder.path))


def test_the_last_evaluation_of_a_run_that_goes_on_is_no_second_row(tmp_path, clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 2)
    for steps, expected in ((2, [1, 2, 2]), (3, [1, 2, 3, 3])):
        with Recorder(recipe(tmp_path, steps), FACTS, resume=str(record.folder.path)) as record:
            go_on(record, clock, record.restore(STATE)[1], steps)
        assert [row["step"] for row in read_metrics(record.folder.path)] == expected


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path, clock: Clock):
    with Recorder(recipe(tmp_path, 2), FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 2)
    with (
        pytest.raises(ValueError, match=r"config.steps=1: .* has already done 2"),
        Recorder(recipe(tmp_path, 1), FACTS, resume=str(record.folder.path)) as record,
    ):
        record.restore(STATE)


@pytest.mark.parametrize("changed", ["base_hash", "data_hash"])
def test_another_base_or_other_data_are_refused(tmp_path: Path, clock: Clock, changed: str):
    facts = FACTS | {"data_hash": "d1"}
    with Recorder(recipe(tmp_path, 2), facts) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 1)
        folder = str(record.folder.path)
    with Recorder(recipe(tmp_path, 2), facts, folder) as record:
        assert record.restore(STATE)[1] == 1
    with (
        Recorder(recipe(tmp_path, 2), facts | {changed: "other"}, folder) as record,
        pytest.raises(ValueError, match=r"other|base\.path holds"),
    ):
        record.restore(STATE)


def one_step(record: Recorder, step: int, **metrics: float) -> None:
    for now in record.timed([step]):
        record.check(now, STATE, METRICS | metrics, BATCH, recipe="fast")


def test_a_gap_saves_state_and_batch_and_says_how_to_go_on(tmp_path: Path):
    with Recorder(recipe(tmp_path, 9), FACTS) as record:
        record.restore(STATE)
        gap = {"parity/max_abs_diff": 0.5, "update/applied": 0}
        with pytest.raises(RuntimeError, match=r"differ by 0.5 .*\(2, 8\).* --resume") as error:
            one_step(record, 4, **gap)
    folder = record.folder.path
    assert np.load(folder / "replays/step_000004/batch.npz").files
    assert not json.loads((folder / "summary.json").read_text())["finished"]
    # What the sentence advises is possible.
    assert f"--resume {folder} and --config.parity=tiles" in str(error.value)
    tiles = recipe(tmp_path, 9) | {"parity": "tiles"}
    with Recorder(tiles, FACTS, resume=str(folder)) as record:
        assert record.restore(STATE)[1] == 4


def test_the_machine_is_read_now_and_then(tmp_path: Path, clock: Clock):
    config = recipe(tmp_path, 4) | {"alerts": {"hardware_seconds": 100.0}}
    with Recorder(config, FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 4)  # 75 s each
    rows = [r for r in read_metrics(record.folder.path) if "tokens" in r]
    assert ["hardware/disk_free_gb" in r for r in rows] == [True, False, True, False]


def test_alerts_are_told_of_a_step_and_of_what_stops_the_run(tmp_path: Path, clock: Clock):
    received = tmp_path / "received"
    alerts = {"command": shlex.join(["tee", "-a", str(received)]), "memory_share": 1e-9}
    config = recipe(tmp_path, 9) | {"alerts": alerts}

    def run(record: Recorder) -> None:
        with record:
            record.restore(STATE)
            go_on(record, clock, 0, 1)
            one_step(record, 1, **{"parity/max_abs_diff": 0.5, "update/applied": 0})

    record = Recorder(config, FACTS)
    with pytest.raises(RuntimeError, match=r"differ by 0\.5"):
        run(record)
    folder = record.folder.path
    told = [(r["step"], r["rule"]) for r in read_rows(folder / "alerts.jsonl")]
    assert told == [(1, "memory"), (2, "log_prob_gap")]
    assert "ALERT log_prob_gap" in (folder / "log.txt").read_text()
    assert '"run_ended"' in received.read_text()
    # Thresholds may be others from here on; what has been told is told no more.
    other = config | {"alerts": alerts | {"memory_share": 1e-8, "off": ["log_prob_gap"]}}
    with Recorder(other, FACTS, resume=str(folder)) as record:
        go_on(record, clock, record.restore(STATE)[1], 3)
    assert [r["step"] for r in read_rows(folder / "alerts.jsonl")] == [1]


def test_alerts_of_a_resumed_run_look_back_at_the_steps_before(tmp_path, clock, monkeypatch):
    for kind, size in (("q_proj", 0.1), ("up_proj", 0.0)):
        monkeypatch.setitem(METRICS, f"adapter/update_size/policy/{kind}", size)
    with Recorder(recipe(tmp_path, 9), FACTS) as record:
        record.restore(STATE)
        go_on(record, clock, 0, 9)
    folder = record.folder.path
    assert read_rows(folder / "alerts.jsonl") == []
    with Recorder(recipe(tmp_path, 11), FACTS, resume=str(folder)) as record:
        go_on(record, clock, record.restore(STATE)[1], 11)
    told = [(r["step"], r["rule"]) for r in read_rows(folder / "alerts.jsonl")]
    assert told == [(10, "dead_adapter")]


def test_a_run_that_makes_no_updates_stops_and_says_why(tmp_path: Path):
    idle = {"update/applied": 0, "reward/infra_failures": 8, "parity/tokens": 0}
    with Recorder(recipe(tmp_path, 9), FACTS) as record:
        record.restore(STATE)
        for step, metrics in enumerate((idle, idle, {}, idle, idle)):
            one_step(record, step, **metrics)  # an update in between: not in a row
        with pytest.raises(RuntimeError, match=r"no update was made for 3 steps; .* 8 rewards"):
            one_step(record, 5, **idle)


def stopped_after(record: Recorder, steps: int, **rates: float) -> str:
    """Steps from 0 on, each saved; `rates` are held-out rates, as at_2=0.5. Then it is killed."""
    record.restore(STATE)
    for step in range(steps):
        rate = rates.get(f"at_{step + 1}")
        one_step(record, step)
        metrics = METRICS | ({} if rate is None else {"heldout/pass_greedy": rate})
        record.step(step, metrics, np.ones(2), ["scored"] * 2, samples=[])
        record.save_if_due(step + 1, STATE)
    record.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    record._saver.wait()
    return str(record.folder.path)


def every(root: Path, steps: int, checkpoint_every_steps: int) -> dict:
    config = recipe(root, steps)
    config["run"] |= {"checkpoint_every_steps": checkpoint_every_steps, "keep_checkpoints": 1}
    return config


def test_the_best_is_saved_out_of_turn_and_kept(tmp_path: Path):
    config = every(tmp_path, 12, checkpoint_every_steps=4)
    rates = {"at_2": 0.5, "at_3": 0.4, "at_6": 0.9, "at_8": 0.9}
    folder = Path(stopped_after(Recorder(config, FACTS), 9, **rates))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000008"]
    # 8 was as good as 6, and is newer.
    with Recorder(config, FACTS, str(folder)) as record:
        _, start = record.restore(STATE)
        one_step(record, start)
        better = METRICS | {"heldout/pass_greedy": 0.7}  # not than 0.9, which is remembered
        record.step(start, better, np.ones(2), ["scored"] * 2, samples=[])
        record.save_if_due(start + 1, STATE)
        record._saver.wait()
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000008"]


@pytest.mark.parametrize("rows_left", [0, 3, 7])
def test_a_run_whose_metrics_were_cut_has_each_row_once_again(tmp_path: Path, rows_left: int):
    config = every(tmp_path, 9, checkpoint_every_steps=3)
    folder = Path(stopped_after(Recorder(config, FACTS), 7))
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(rows[:rows_left]) + rows[0][:20])
    with Recorder(config, FACTS, str(folder)) as record:
        _, start = record.restore(STATE)
        assert start == 6
        one_step(record, start)
        record.step(start, METRICS, np.ones(2), ["scored"] * 2, samples=[])
    again = read_metrics(folder)
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6, 7]
    assert again[:6] == [json.loads(row) for row in rows[:6]]


def test_a_step_of_which_nothing_was_graded_has_no_mean_reward(tmp_path: Path):
    with Recorder(recipe(tmp_path, 9), FACTS) as record:
        record.restore(STATE)
        for step, rewards in enumerate(([np.nan, np.nan], [np.nan, 0.5])):
            one_step(record, step)
            record.step(step, METRICS, np.array(rewards), ["scored"] * 2, samples=[])
    assert [row["reward/mean"] for row in read_metrics(record.folder.path)] == [None, 0.5]


def out_of_memory() -> None:
    jnp.zeros(1 << 46)


def disk_full() -> None:
    Path("/dev/full").write_text("x")


def slip() -> None:
    raise KeyError("a slip")


def ended_by(fault: Callable[[], None], root: Path) -> None:
    with Recorder(every(root, 9, checkpoint_every_steps=1), FACTS) as record:
        record.restore(STATE)
        one_step(record, 0)
        record.step(0, METRICS, np.ones(2), ["scored"] * 2, samples=[])
        record.save_if_due(1, STATE)
        record._saver.wait()
        fault()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (disk_full, "the disk of the run folder is full"),
        (out_of_memory, "a device has run out of memory .*ppo.micro_batches"),
    ],
)
def test_faults_of_the_machine_end_in_a_sentence_that_says_how_to_go_on(tmp_path, fault, words):
    with pytest.raises(RuntimeError, match=f"{words}.*newest checkpoint is step_000001.*--resume"):
        ended_by(fault, tmp_path)


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(KeyError, match="a slip"):
        ended_by(slip, tmp_path)
