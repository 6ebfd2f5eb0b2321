"""Losses against TRL's own: see `tests/goldens/make_algorithm_goldens.py`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.rl import kl
from orbit_jax.rl.aggregation import token_weights
from orbit_jax.rl.losses import LOSSES, Tokens

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens/algorithms.json").read_text())
MASK = np.bool_(GOLDENS["mask"])
# Of each case what differs from a clip of 0.2 and 0.28: TRL names it otherwise.
CONFIGS = {
    "ppo_clip token_mean": {},
    "ppo_clip sequence_mean": {},
    "ppo_clip constant_length": {},
    "ppo_clip dual_clip": {"dual_clip": 1.5},
    "gspo sequence_mean": {"clip_low": 0.03, "clip_high": 0.04},
    "cispo token_mean": {"clip_low": 1.0},
}


def ours(case: str, **config) -> tuple[float, np.ndarray]:
    """Loss and gradient of the padded rows, laid out as one stream."""
    name, how = case.split()
    how = how if how.split("_")[-1] in ("mean", "length") else "token_mean"
    rows = np.repeat(np.arange(4, dtype=np.int32), 6)
    flat = {k: np.float32(GOLDENS[k]).reshape(-1) for k in ("logprobs", "old", "reference")}
    on = MASK.reshape(-1)
    limit = GOLDENS["max_completion_tokens"]
    weights = token_weights(how, on[None], rows[None], 4, limit)[0]
    advantages = np.float32(GOLDENS["advantages"])[rows]

    def total(logprobs: jax.Array) -> jax.Array:
        x = Tokens(jnp.where(on, logprobs, 0), flat["old"] * on, advantages, on, rows, 4)
        loss, _ = LOSSES[name](PPOConfig(**{"clip_low": 0.2, "clip_high": 0.28} | config), x)
        if case.endswith("kl_in_loss"):
            loss += 0.3 * kl.in_loss("k3", x.logprobs, flat["reference"] * on)
        return (loss * weights).sum()

    loss, gradient = jax.value_and_grad(total)(flat["logprobs"])
    return float(loss), np.asarray(gradient).reshape(MASK.shape)


@pytest.mark.parametrize("case", CONFIGS)
def test_losses_and_their_gradients_are_those_of_trl(case):
    golden, config = GOLDENS["cases"][case], CONFIGS[case]
    loss, gradient = ours(case, **config)
    assert loss == pytest.approx(golden["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, golden["gradient"], atol=1e-6)
    assert np.count_nonzero(gradient) < MASK.sum() or "cispo" in case  # something is clipped


def test_the_value_of_k3_in_the_loss_is_that_of_trl_and_its_gradient_is_not():
    """TRL differentiates k3 itself, which is the gradient of another KL."""
    case = "ppo_clip kl_in_loss"
    loss, gradient = ours(case)
    assert loss == pytest.approx(GOLDENS["cases"][case]["loss"], abs=1e-6)
    assert np.abs(gradient - GOLDENS["cases"][case]["gradient"]).max() > 1e-3
