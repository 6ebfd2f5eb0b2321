"""A run that goes on on another number of devices: the same rollouts, gradients to rounding."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import ppo_math  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.config import from_config_dict  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")
FIELDS = {"evaluation.every_steps": 9, "run.checkpoint_every_steps": 1, "run.keep_checkpoints": 9}
TWO = {"mesh.data": 2, "mesh.simulate": True}


def recipe(root: Path, steps: int):
    config = tiny_moe.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(root)
    config.run.samples_every_steps = 1
    config.steps = steps
    config.update_from_flattened_dict(FIELDS)
    return from_config_dict(config)


def samples(folder: Path, step: int) -> list[tuple]:
    text = (folder / f"samples/step_{step:06d}.jsonl").read_text()
    rows = map(json.loads, text.splitlines())
    return [(row["ids"], row["logprobs"], row["reward"]) for row in rows]


@pytest.mark.long
def test_a_run_of_one_device_goes_on_on_two(tmp_path, compiled_programs):
    for name, steps in (("whole", 3), ("moved", 2)):
        ppo_math.run(recipe(tmp_path / name, steps))
    (whole,) = (tmp_path / "whole").iterdir()
    (moved,) = (tmp_path / "moved").iterdir()
    command = [
        sys.executable,
        "experiments/ppo_math.py",
        "--config=configs/tiny_moe.py:test",
        f"--config.run.root={tmp_path / 'moved'}",
        "--config.run.samples_every_steps=1",
        *(f"--config.{name}={value}" for name, value in (FIELDS | TWO | {"steps": 3}).items()),
        f"--resume={moved}",
    ]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    refused = subprocess.run(command, **options)
    assert refused.returncode == 2
    assert "--change=mesh.data,mesh.simulate" in refused.stderr
    told = subprocess.run([*command, "--change=mesh.data,mesh.simulate"], **options)
    assert told.returncode == 0, told.stderr
    # Log-probs do not depend on the mesh: the third step draws the same rollouts, to the bit.
    assert samples(moved, 3) == samples(whole, 3)
    states = [run_state.stored_arrays(f / "checkpoints/step_000003") for f in (whole, moved)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        if array.dtype == np.float32:
            size = np.abs(array).max()
            assert np.abs(array - states[1][name]).max() <= 0.1 * size, name
