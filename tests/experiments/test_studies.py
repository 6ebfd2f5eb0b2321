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

import expert_adapters  # noqa: E402


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


def test_an_arm_of_expert_adapters_is_trained_and_told(tmp_path):
    given = ("--quick", "--steps", 1, "--arms", "none", "--root", tmp_path, "--out", tmp_path)
    assert "none" in study("expert_adapters", *given)
    (row,) = json.loads((tmp_path / "expert_adapters.json").read_text())
    assert row["beside_attention"]["trained"] == 43_008
    assert row["trained_kimi_k2"] == 87_569_408


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


def test_an_algorithm_is_trained_told_and_not_run_twice(tmp_path):
    given = ("--quick", "--steps", 1, "--arms", "gspo", "--seeds", 0)
    where = ("--root", tmp_path, "--out", tmp_path)
    assert "gspo" in study("algorithms", *given, *where)
    found = json.loads((tmp_path / "algorithms.json").read_text())
    (one,) = found["arms"]["gspo"]["runs"].values()
    assert one["parity_max_abs_diff"] == 0
    assert "run folder" not in study("algorithms", *given, *where)
