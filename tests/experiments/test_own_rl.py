"""A loss, an advantage, an adapter and a task of one's own, named in a config, all in one run."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import own_rl  # noqa: E402
import ppo_math  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax.adapters.footprint import footprint  # noqa: E402
from orbit_jax.config import from_config_dict  # noqa: E402
from orbit_jax.ppo_config import PPOConfig  # noqa: E402
from orbit_jax.rl.losses import Tokens  # noqa: E402
from orbit_jax.runs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_once")


def recipe(root: Path, file: Path, **fields):
    config = tiny_moe.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.run.root = str(root)
    config.ppo.loss = f"{file}:tapered"
    config.ppo.advantage = f"{file}:low_baseline"
    config.adapter.method = f"{file}:gains"
    config.task.mixture = (f"{ROOT / 'experiments/own_task.py'}:Nearness",)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return from_config_dict(config)


def test_a_run_takes_all_of_them_from_files_and_goes_on_only_with_that_file(tmp_path):
    file = tmp_path / "my_rl.py"
    file.write_text(Path(own_rl.__file__).read_text())
    summary = ppo_math.run(recipe(tmp_path / "runs", file))
    (folder,) = (tmp_path / "runs").iterdir()
    assert summary["finished"]
    assert summary["parity_max_abs_diff"] == 0
    assert 0 < summary["adapter_bytes"] < 100_000  # of rank 16 it would be far more
    steps = [row for row in read_metrics(folder) if "reward/mean" in row]
    assert all({"taper", "details/off_by"} <= row.keys() for row in steps)
    assert steps[0]["adapter/update_size"] == 1  # gains are 0 at first
    assert json.loads((folder / "config.json").read_text())["ppo"]["loss"].endswith(":tapered")
    assert ppo_math.run(recipe(tmp_path / "runs", file, steps=3), str(folder))["finished"]
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(ValueError, match="was trained on other code"):
        ppo_math.run(recipe(tmp_path / "runs", file, steps=4), str(folder))


def test_what_went_badly_is_weighed_by_the_ratio_of_its_row():
    """By hand: of rows with log-ratios -1 and 2 and A = -1 the weights are e^-1 and 1."""
    logprobs = jnp.array([-1.5, -0.5, -1.0, -3.0, -1.0, -1.0])
    old = jnp.array([-1.0, 0.0, -2.0, -4.0, -1.5, -1.0])  # rows: 0 0 | 1 1 | 2 2
    advantages = jnp.array([-1.0, -1.0, -1.0, -1.0, 2.0, 2.0])
    rows = jnp.repeat(jnp.arange(3), 2)
    mask = jnp.ones(6, bool)

    def total(logprobs):
        loss, metrics = own_rl.tapered(
            PPOConfig(), Tokens(logprobs, old, advantages, mask, rows, 3)
        )
        return loss.sum(), metrics["taper"]

    gradient, taper = jax.grad(total, has_aux=True)(logprobs)
    expected = np.float32([np.exp(-1), np.exp(-1), 1, 1, 1, 1])
    np.testing.assert_allclose(taper, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, -np.asarray(advantages) * expected, rtol=1e-6)


def test_an_adapter_of_ones_own_is_counted_before_there_is_a_base():
    base = {"layers": [{"self_attn": {"q_proj": jax.ShapeDtypeStruct((3, 6, 4), jnp.float32)}}]}
    found = footprint(own_rl.Gains(), base, ("q_proj",))
    assert (found.parameters, found.weights[0].size) == (18, 0)


def test_gains_of_an_output_scale_the_weights_rows():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((6, 4), np.float32)
    x = rng.standard_normal((3, 4), np.float32)
    params = {"g": jnp.asarray(rng.standard_normal(6, np.float32))}
    method = own_rl.Gains()
    assert {n: p.shape for n, p in method.init(jax.random.key(0), w.shape).items()} == {"g": (6,)}
    np.testing.assert_allclose(
        method.output_side(params, x, x @ w.T), x @ method.merge(params, w).T, rtol=1e-5, atol=1e-5
    )
