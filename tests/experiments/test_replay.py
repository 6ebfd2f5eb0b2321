"""A batch that went wrong is kept, and taken again alone."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import ppo_math  # noqa: E402
import replay  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.config import from_config_dict  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")

BROKEN = """
import jax.numpy as jnp

def broken(config, x):
    return x.logprobs * jnp.nan, {}
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run whose loss is never finite; it has stopped by itself."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "my_loss.py").write_text(BROKEN)
    config = tiny_moe.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(folder / "runs")
    config.steps = 9
    config.ppo.loss = f"{folder}/my_loss.py:broken"
    with pytest.raises(RuntimeError, match="no update was made for 3 steps; of the last, the grad"):
        ppo_math.run(from_config_dict(config))
    (run,) = (folder / "runs").iterdir()
    return run


def test_batches_that_are_not_finite_are_passed_over_until_some_in_a_row_stop_the_run(stopped):
    assert "WARNING: step 0: the gradient of" in (stopped / "log.txt").read_text()
    kept = sorted(path.name for path in (stopped / "replays").iterdir())
    assert kept == ["step_000000", "step_000001", "step_000002"]
    rows = [row for row in read_metrics(stopped) if "update/applied" in row]
    assert [row["update/applied"] for row in rows] == [0, 0]  # the third ended the run
    found = run_state.latest(stopped / "checkpoints").path
    assert found.name == "step_000002"  # the last good state, to go on from
    assert not json.loads((stopped / "summary.json").read_text())["finished"]


def test_a_kept_batch_takes_its_step_again_alone(stopped, capsys, monkeypatch):
    path = stopped / "replays/step_000001"
    monkeypatch.setattr(sys, "argv", ["replay.py", str(path)])
    assert replay.main() == 1
    out = capsys.readouterr().out
    assert "then: the gradient of" in out
    assert "nan" in out
    _, metrics, batch, own = replay.replay(path, "")
    assert np.isnan(metrics["gradient_norm/policy"])
    # Sampler and trainer agreed to the bit, and here they do so again.
    sampled = np.asarray(batch.sampled)
    assert sampled.sum() > 50
    assert np.array_equal(own[sampled], np.asarray(batch.logprobs)[sampled])


def test_the_token_where_log_probs_differ_is_found(stopped):
    path = stopped / "replays/step_000002"
    with np.load(path / "batch.npz") as file:
        fields = dict(file)
    at = tuple(np.argwhere(fields["sampled"])[7])
    fields["logprobs"][at] -= 0.5
    np.savez(path / "batch.npz", **fields)
    _, metrics, batch, own = replay.replay(path, "")
    assert metrics["parity/max_abs_diff"] == pytest.approx(0.5)
    worst, second, *_ = replay.furthest(batch, own)
    assert worst[1:3] == (str(fields["stream.positions"][at]), str(fields["stream.tokens"][at]))
    assert float(worst[-1]) == pytest.approx(0.5)
    assert float(second[-1]) == 0


def test_what_is_no_kept_batch_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replay.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        replay.main()
    assert "has no batch.npz: name a folder under a run's replays/" in capsys.readouterr().err
