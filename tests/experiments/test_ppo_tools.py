"""The experiment of several turns, end to end on few and small rollouts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import ppo_math  # noqa: E402

from configs import tiny_tools  # noqa: E402
from orbit_jax.config import from_config_dict  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")


def recipe(root: Path, **fields):
    config = tiny_tools.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(root)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return from_config_dict(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict]:
    root = tmp_path_factory.mktemp("tools")
    summary = ppo_math.run(recipe(root, steps=4, run__samples_every_steps=1))
    (folder,) = root.iterdir()
    return folder, summary


def test_every_task_has_metrics_and_log_probs_of_all_turns_are_exact(finished):
    folder, summary = finished
    assert summary["finished"]
    assert summary["parity_max_abs_diff"] == 0
    assert summary["parity_tokens"] > 500
    rows = read_metrics(folder)
    assert {"heldout_sums/pass_greedy", "heldout_products/pass_greedy"} <= rows[0].keys()
    for row in rows[1:5]:
        assert {"task_sums/reward", "task_products/reward", "turns/mean"} <= row.keys()
    assert sum(row.get("tools/ok", 0) for row in rows) > 0


def test_samples_tell_turn_by_turn_what_was_sampled(finished):
    folder, _ = finished
    samples = [
        json.loads(line)
        for file in sorted((folder / "samples").iterdir())
        for line in file.read_text().splitlines()
    ]
    several = [one for one in samples if len(one["turns"]) > 1]
    assert several
    for one in several:
        assert [role for role, _ in one["turns"]][:2] == ["assistant", "tool"]
        assert len(one["sampled"]) == len(one["ids"])
        assert sum(one["sampled"]) == len(one["logprobs"]) < len(one["ids"])
        first = one["turns"][0][1]
        assert bytes(i for i in one["ids"][: len(first)] if i < 256).decode() == first


def test_a_resumed_run_goes_on_bit_for_bit(finished, tmp_path):
    """R1, R3: the cursor of the mixture is a function of the step; other data are refused."""
    whole, _ = finished
    fields = {"run__samples_every_steps": 1, "run__checkpoint_every_steps": 2}
    ppo_math.run(recipe(tmp_path, steps=2, **fields))
    (part,) = tmp_path.iterdir()
    ppo_math.run(recipe(tmp_path, steps=4, **fields), resume=str(part))
    for name in ("step_000003.jsonl", "step_000004.jsonl"):
        assert (part / "samples" / name).read_text() == (whole / "samples" / name).read_text()
    rewards = [
        [row["reward/mean"] for row in read_metrics(folder) if "reward/mean" in row]
        for folder in (whole, part)
    ]
    np.testing.assert_array_equal(*rewards)


def test_a_run_without_tasks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name at least one task"):
        ppo_math.run(recipe(tmp_path, task__mixture=()))
