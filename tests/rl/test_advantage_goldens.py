"""Advantages and estimators of KL against verl's own: see `goldens/make_advantage_goldens.py`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.rl.advantages import ADVANTAGES, Experience
from orbit_jax.rl.kl import ESTIMATORS

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens/advantages.json").read_text())
MASK = np.bool_(GOLDENS["mask"])
# verl whitens by the spread of a sample, we by that of the batch as it is.
AS_OURS = np.sqrt(MASK.sum() / (MASK.sum() - 1))
SPREADS = {"reinforce_pp": AS_OURS, "reinforce_pp_baseline": AS_OURS, "gae": AS_OURS}


def ours(name: str, micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of the padded rows, laid out as one stream for each micro-batch."""
    rows, tokens = MASK.shape
    rows_each = -(-rows // micro_batches)

    def laid_out(values, per_row: bool = False) -> jax.Array:
        values = np.asarray(values)
        padding = [(0, micro_batches * rows_each - rows), *[(0, 0)] * (values.ndim - 1)]
        whole = np.pad(values, padding)
        return jnp.asarray(whole.reshape(micro_batches, rows_each * (1 if per_row else tokens)))

    x = Experience(
        mask=laid_out(MASK),
        rows=jnp.tile(jnp.repeat(jnp.arange(rows_each), tokens), (micro_batches, 1)),
        rewards=laid_out(np.float32(GOLDENS["rewards"]), per_row=True),
        counted=laid_out(np.ones(rows, bool), per_row=True),
        groups=laid_out(np.int32(GOLDENS["groups"]), per_row=True),
        truncated=laid_out(np.zeros(rows, bool), per_row=True),
        penalty=laid_out(np.zeros(MASK.shape, np.float32)),
        values=laid_out(np.float32(GOLDENS["values"])) * (name == "gae"),
        last_values=laid_out(np.zeros(rows, np.float32), per_row=True),
        num_groups=rows,
    )
    found = ADVANTAGES[name](PPOConfig(gamma=GOLDENS["gamma"], lam=GOLDENS["lam"]), x)
    return tuple(np.asarray(f).reshape(-1, tokens)[:rows] * MASK for f in found)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", GOLDENS["advantages"])
def test_advantages_are_those_of_verl(name, micro_batches):
    """Of rows that pause for a tool, in groups that lie across micro-batches."""
    found, _ = ours(name, micro_batches)
    expected = np.float32(GOLDENS["advantages"][name]) * SPREADS.get(name, 1.0)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_returns_of_a_critic_are_those_of_verl():
    np.testing.assert_allclose(ours("gae", 1)[1], GOLDENS["returns"], atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_kl_are_those_of_verl(name):
    logprobs, reference = (np.float32(GOLDENS[k]) for k in ("logprobs", "reference"))
    found = jax.jit(ESTIMATORS[name])(logprobs, reference)
    np.testing.assert_allclose(found, GOLDENS["kl"][name], atol=1e-6)
