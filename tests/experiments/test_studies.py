"""Studies that take long, in their quick setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def test_a_step_on_eight_devices_is_that_of_one(tmp_path):
    study("mesh_check", "--configs", "configs/tiny_moe.py:test", "--out", tmp_path)
    (row,) = json.loads((tmp_path / "mesh_check.json").read_text())
    assert row["tokens"] > 100
    assert [row[name] for name in ("other_ids", "logprobs", "parity_one", "parity_mesh")] == [0] * 4
    assert 0 < row["gradients"] < 0.05


def test_an_expert_adapter_is_trained_beside_attention_and_alone(tmp_path):
    given = ("--quick", "--steps", 1, "--arms", "outer:2", "--root", tmp_path, "--out", tmp_path)
    printed = study("expert_adapters", *given)
    assert "outer:2" in printed
    (row,) = json.loads((tmp_path / "expert_adapters.json").read_text())
    assert 0 < row["alone"]["trained"] < row["beside_attention"]["trained"]
    assert row["trained_kimi_k2"] > 1e8
