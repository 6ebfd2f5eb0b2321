"""One of each hazard, really: the run that met them ends as one that nobody disturbed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "true"]


@pytest.mark.long
@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(NAMESPACE, capture_output=True).returncode != 0,
    reason="a file system of its own takes Linux and its user namespaces",
)
def test_a_run_that_met_each_hazard_equals_one_that_met_none(tmp_path, compiled_programs):
    command = [
        sys.executable,
        "experiments/chaos.py",
        f"--out={tmp_path / 'chaos'}",
        "--config=configs/tiny_moe.py:test",
        f"--config.run.root={tmp_path}",
        "--config.steps=5",
        "--config.run.checkpoint_every_steps=2",
        "--config.run.samples_every_steps=1",
        "--hazards=5",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "chaos/chaos.json").read_text())
    assert set(found["same"]) == {"each step once", "metrics", "samples", "state"}
    assert all(found["same"].values())
    assert len({one["hazard"] for one in found["hazards"]}) == 5
    assert "the disk of the run folder is full" in (tmp_path / "chaos/output.txt").read_text()
