"""The experiment to copy: short, exact, and gone on with bit for bit."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import forkme  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax import own_code  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.config import Config, from_config_dict  # noqa: E402
from orbit_jax.rl.advantages import dr_grpo  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")


def recipe(root: Path) -> Config:
    config = tiny_moe.get_config("test")
    config.base.path, config.run.root = str(ROOT / config.base.path), str(root)
    config.run.checkpoint_every_steps = 1
    return from_config_dict(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict]:
    root = tmp_path_factory.mktemp("forkme")
    summary = forkme.run(recipe(root))
    (folder,) = root.iterdir()
    return folder, summary


def rows(folder: Path) -> list[dict]:
    of_time = ("seconds/", "tokens_per_second", "hardware/", "memory/", "heldout/")
    kept = [row for row in read_metrics(folder) if "tokens" in row]
    return [{k: v for k, v in row.items() if not k.startswith(of_time)} for row in kept]


def test_a_run_leaves_a_whole_folder_and_its_gap_is_0(finished):
    folder, summary = finished
    assert folder.name.startswith("forkme-")
    assert summary["finished"]
    assert summary["parity_max_abs_diff"] == 0
    assert summary["parity_tokens"] > 100
    assert [row["update/applied"] for row in rows(folder)] == [1, 1]
    assert (folder / "plots/learning_curve.png").stat().st_size > 10_000
    lines = (folder / "samples/step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 8 * 4  # prompts, and twice the group
    sample = json.loads(lines[0])
    assert forkme.reward(sample["prompt"], sample["turns"][0][1]) == sample["reward"]


def test_of_each_prompt_both_right_and_wrong_are_kept_where_there_are_both(finished):
    samples = (finished[0] / "samples/step_000001.jsonl").read_text().splitlines()
    rewards = np.array([json.loads(line)["reward"] for line in samples]).reshape(8, 4)
    right = rewards.mean(axis=1)
    assert any((right > 0) & (right < 1))
    kept = np.where((right > 0) & (right < 1), 0.5, right)  # two of four
    first = rows(finished[0])[0]
    assert first["kept/reward_mean"] == kept.mean()
    assert first["reward/mean"] == rewards.mean()


def test_the_config_names_the_code_that_ran(finished):
    """So that another file is refused on resume, and a kept batch is replayed by its own loss."""
    ppo = json.loads((finished[0] / "config.json").read_text())["ppo"]
    assert ppo["loss"].endswith("forkme.py:loss")
    assert own_code.load_own(ppo["advantage"]) is dr_grpo


def test_a_run_goes_on_bit_for_bit(finished, tmp_path):
    whole, part = finished[0], tmp_path / "part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints/step_000002")
    assert forkme.run(recipe(tmp_path / "unused"), resume=str(part))["finished"]
    assert rows(part) == rows(whole)
    one, other = (run_state.latest(folder / "checkpoints").path for folder in (whole, part))
    assert one.name == other.name == "step_000002"
    one, other = (
        run_state._load(p, state=run_state.ocp.args.StandardRestore()) for p in (one, other)
    )
    for name, value in one["state"].items():
        np.testing.assert_array_equal(value, other["state"][name])


def test_of_a_prompts_rollouts_those_are_kept_whose_rewards_vary_most():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rewards = rng.choice([0.0, 0.25, 1.0], 7)
        best = max(np.var(few) for few in itertools.combinations(rewards, 4))
        chosen = forkme.most_telling(rewards, 4)
        assert len(set(chosen)) == 4
        assert np.var(rewards[chosen]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("completion", "earned"),
    [(r"1+2=3;3-9=-6;\boxed{-6}", 1.0), (r"\boxed{6}", 0.0), ("it is", 0.0), (r"\boxed{x}", 0.0)],
)
def test_the_right_number_earns_1(completion, earned):
    assert forkme.reward("1+2-9", completion) == earned


def test_it_stays_shorter_than_what_it_is_an_alternative_to():
    lines = Path(forkme.__file__).read_text().splitlines()
    assert len(lines) < 150
    assert [line[7] for line in lines if line.startswith("# ---- ")][:3] == ["1", "2", "3"]
