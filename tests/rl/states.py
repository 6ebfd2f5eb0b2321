"""What tests ask of a train state and of a batch."""

import jax
import numpy as np
import optax

from orbit_jax.rl.batch import Batch
from orbit_jax.rl.train_state import TrainState


def moments(state: TrainState) -> dict:
    """Adam's first moment of the policy: after one step from zero, 0.1 times the gradient."""
    found = optax.tree.get(state.optimizer.inner_states["policy"], "mu")
    assert jax.tree.leaves(found)
    return found


def updates_counted(state: TrainState) -> int:
    """How many updates the policy's optimiser has made."""
    counts = optax.tree.get_all_with_path(state.optimizer.inner_states["policy"], "count")
    (count,) = {int(value) for _, value in counts}
    return count


def same_bits(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y, equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def assert_close(a, b, rtol: float) -> None:
    """Trees agree to `rtol` of each leaf's largest entry."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max())


def assert_nothing_moved(before: TrainState, after: TrainState, metrics: dict) -> None:
    assert metrics["update/applied"] == 0
    assert metrics["adapter/update_size"] == 0
    assert same_bits(after, jax.device_get(before))


def rewards_of(batch: Batch, values: dict[int, float]) -> Batch:
    rewards = np.array(batch.rewards)
    for row, value in values.items():
        rewards.reshape(-1)[row] = value
    return batch.replace(rewards=rewards)


def nudged(batch: Batch, by: float = 1e-3) -> Batch:
    """The sampler's log-prob of one token is off."""
    logprobs = np.array(batch.logprobs)
    logprobs[tuple(np.argwhere(batch.sampled)[5])] += by
    return batch.replace(logprobs=logprobs)
