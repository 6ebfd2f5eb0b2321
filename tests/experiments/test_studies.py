"""Studies that take long, in their quick setting."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import algorithms  # noqa: E402
import expert_adapters  # noqa: E402

from orbit_jax.rl.advantages import ADVANTAGES  # noqa: E402
from orbit_jax.rl.losses import LOSSES  # noqa: E402


def study(name: str, *arguments: object) -> str:
    ended = subprocess.run(
        [sys.executable, f"experiments/{name}.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
def test_an_arm_of_expert_adapters_is_trained_and_told(tmp_path):
    given = ("--quick", "--steps", 1, "--arms", "none", "--root", tmp_path, "--out", tmp_path)
    assert "none" in study("expert_adapters", *given)
    (row,) = json.loads((tmp_path / "expert_adapters.json").read_text())
    assert row["beside_attention"]["trained"] == 43_008
    assert row["trained_kimi_k2"] == 87_569_408


@pytest.mark.long
def test_turns_cost_the_same_bits_from_the_cache_and_computed_again(tmp_path):
    assert "0.0" in study("turn_cost", "--quick", "--out", tmp_path)
    found = json.loads((tmp_path / "turn_cost.json").read_text())
    assert [row["before"] for row in found["turns"]] == [0, 16]
    for row in (*found["turns"], *found["sizes"]):
        assert (row["max_abs_diff"], row["other_ids"], row["compared"]) == (0.0, 0, 16)
        assert row["cache_seconds"] > 0 < row["recomputed_seconds"]
    assert (tmp_path / "turn_cost.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arm", "rotations"),
    [
        ("oft-each:8", 384 * (2 * 7168 + 2048) // 8 * 28),
        ("oft-outer:32", (2 * 7168 + 384 * 2048) // 32 * 496),
        ("oft-all:32", (2 * 7168 + 2048) // 32 * 496),
    ],
)
def test_rotations_of_experts_are_counted_on_the_large_model(arm, rotations):
    """Those of 60 layers, beside what is on attention and on what every token visits."""
    beside = expert_adapters.parameters_of_the_large_model("oft-none")
    assert expert_adapters.parameters_of_the_large_model(arm) - beside == 60 * rotations


@pytest.mark.parametrize("text", ["oft", "oft-each", "none:2", "oft-each:0", "rot-each:8"])
def test_what_is_no_arm_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no arm: give each, outer or all"):
        expert_adapters._arm(text)


def test_algorithms_are_told_by_arm_and_seed_and_none_is_run_twice(tmp_path, monkeypatch, capsys):
    asked = []

    def run(config):
        asked.append((config.ppo.loss, config.adapter.method, config.seed, config.steps))
        figures = {"heldout_pass_after": 0.5 + config.seed / 10, "reward_mean": 0.25}
        more = {"parity_max_abs_diff": 0.0, "adapter_bytes": 4000, "seconds": 1.0}
        return {"finished": True} | figures | more

    monkeypatch.setattr(algorithms, "run", run)
    given = ["algorithms.py", "--steps", "3", "--arms", "gspo", "oft_8", "--out", str(tmp_path)]
    for seeds in ("0 1", "0 1 2"):
        monkeypatch.setattr(sys, "argv", [*given, "--seeds", *seeds.split()])
        assert algorithms.main() == 0
    both = [("gspo", "lora"), ("ppo_clip", "oft")]
    assert asked == [(*arm, seed, 3) for seed in range(3) for arm in both]
    assert "60.0%  50.0%, 60.0%, 70.0%" in capsys.readouterr().out
    assert "| 60.0% | 50.0%, 60.0%, 70.0% | 0.250 | 0 |" in (tmp_path / "algorithms.md").read_text()
    monkeypatch.setattr(sys, "argv", [*given[:2], "4", *given[3:]])
    with pytest.raises(SystemExit, match="has runs of 3 steps"):
        algorithms.main()


def test_every_arm_of_the_algorithms_is_a_valid_config():
    arguments = argparse.Namespace(steps=3, quick=True, root=Path("runs"))
    configs = {arm: algorithms.config_of(arm, 0, arguments) for arm in algorithms.ARMS}
    advantages = {config.ppo.advantage for config in configs.values()}
    losses = {config.ppo.loss for config in configs.values()}
    assert advantages == ADVANTAGES.keys()
    assert losses == LOSSES.keys()
