"""Every loss, advantage and aggregation through the real sampler and step, and what stops them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from lab import Lab, prompts
from states import (
    assert_close,
    assert_nothing_moved,
    moments,
    nudged,
    rewards_of,
    same_bits,
    updates_counted,
)

from orbit_jax.ppo_config import CHOICES
from orbit_jax.rl.advantages import ADVANTAGES
from orbit_jax.rl.losses import LOSSES
from orbit_jax.rl.sampler import LENGTH


@pytest.fixture(scope="module")
def adapter(toy: Lab):
    return toy.adapter()


@pytest.fixture(scope="module")
def sampled(toy: Lab, adapter):
    return toy.generate(adapter)


@pytest.mark.parametrize(
    ("advantage", "loss", "aggregation"),
    # The three do not know of each other, so that each is met and not each combination.
    [
        pytest.param(*choice, marks=[pytest.mark.long] if i > 2 else [])
        for i, choice in enumerate(
            zip(
                CHOICES["ppo.advantage"],
                itertools.cycle(CHOICES["ppo.loss"]),
                itertools.cycle(CHOICES["ppo.aggregation"]),
                strict=False,
            )
        )
    ],
)
def test_each_algorithm_moves_the_adapter_by_a_finite_step_without_a_gap(
    toy, adapter, sampled, advantage, loss, aggregation
):
    config = toy.config(
        advantage=advantage, loss=loss, aggregation=aggregation, kl="off", learning_rate=1e-3
    )
    critic = toy.critic() if advantage == "gae" else None
    state = toy.state(config, adapter, critic=critic)
    batch = rewards_of(toy.batch(sampled, micro_batches=2), {3: np.nan})
    after, metrics = toy.train(config, state, batch, LOSSES[loss], ADVANTAGES[advantage])
    assert metrics["parity/max_abs_diff"] == 0.0
    assert metrics["ratio/max"] == 1.0
    assert metrics["update/applied"] == 1
    assert metrics["reward/infra_failures"] == 1
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["gradient_norm/policy"] > 0
    assert 0 < metrics["adapter/update_size"] <= 1
    assert not same_bits(after.policy, jax.device_get(state.policy))


# L4: means


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("sequence_mean", (5 * 0.5 + 16 * 0.3) / 21),
        ("constant_length", (100 * 0.5 + 80 * 0.3) / (21 * 64)),
    ],
)
def test_the_loss_is_one_mean_over_the_rows_of_all_micro_batches(toy, adapter, aggregation, wanted):
    """Rows of 20 tokens and an advantage of -0.5, and others of 5 and -0.3, unevenly spread."""
    rollouts = toy.generate(
        adapter, prompts=prompts(6, 8, 10), stop_ids=(), max_completion_tokens=54
    )
    counts, values = [20] * 5 + [0] + [5] * 16 + [0] * 2, [0.5] * 5 + [0] + [0.3] * 16 + [0] * 2
    masks = np.zeros_like(rollouts.sampled)
    for row, count in enumerate(counts):
        masks[row, rollouts.prompt_lengths[row] :][:count] = True
    rollouts = dataclasses.replace(rollouts, sampled=masks)
    # One row without tokens balances each group's rewards.
    rewards = -np.float32(values)
    rewards[5], rewards[22] = -rewards[:5].sum(), -rewards[6:22].sum()
    groups = np.int32([0] * 6 + [1] * 18)
    rollouts = dataclasses.replace(rollouts, groups=groups)
    config = toy.config(aggregation=aggregation, kl="off")
    batch = toy.batch(rollouts, rewards, micro_batches=4)
    _, metrics = toy.train(config, toy.state(config, adapter), batch)
    assert metrics["loss/policy"] == pytest.approx(wanted, rel=1e-5)


# Rows that are left out


def test_rows_cut_at_the_limit_are_left_out_and_their_reward_counts(toy, adapter, sampled):
    """As if their tokens had been somebody else's; not as if their rewards were not known."""
    cut = np.flatnonzero(sampled.status == LENGTH)
    assert 0 < len(cut) < Lab.rows
    plain, filtered = toy.config(), toy.config(overlong_filter=True)
    state, batch = toy.state(plain, adapter), toy.batch(sampled)
    given = sampled.sampled.copy()
    given[cut] = False
    expected, _ = toy.train(plain, state, toy.batch(dataclasses.replace(sampled, sampled=given)))
    unknown, _ = toy.train(plain, state, rewards_of(batch, dict.fromkeys(cut, np.nan)))
    after, metrics = toy.train(filtered, state, batch)
    assert metrics["update/overlong_tokens"] == sampled.sampled[cut].sum()
    assert metrics["parity/tokens"] == sampled.sampled.sum()
    assert_close(moments(after), moments(expected), rtol=1e-2)
    with pytest.raises(AssertionError):
        assert_close(moments(after), moments(unknown), rtol=1e-1)


# Updates that are not made


def test_no_update_is_made_once_the_policy_is_too_far_away(toy, adapter, sampled):
    """The first update is made, since nothing has moved; its KL is above the limit."""
    config = toy.config(epochs=2, minibatches=2, kl="off", learning_rate=1e-3, max_kl=1e-7)
    state = toy.state(config, adapter)
    after, metrics = toy.train(config, state, toy.batch(sampled, micro_batches=4))
    assert metrics["parity/max_abs_diff"] == 0
    assert metrics["update/applied"] == 1
    assert metrics["update/stopped_by_kl"] == metrics["update/skipped_minibatches"] == 3
    assert updates_counted(after) == 1
    assert metrics["kl/rollout_k3"] > 1e-7


def test_tokens_that_weigh_too_much_or_too_little_are_dropped(toy, adapter, sampled):
    config = toy.config(exact=False, correction="token_mask", kl="off")
    state, batch = toy.state(config, adapter), toy.batch(sampled)
    _, metrics = toy.train(config, state, nudged(nudged(batch, np.log(3)), np.log(0.9)))
    assert metrics["update/applied"] == 1
    assert metrics["correction/dropped"] == pytest.approx(1 / sampled.sampled.sum())
    after, metrics = toy.train(config, state, batch.replace(logprobs=batch.logprobs - 1))
    assert metrics["correction/dropped"] == 1
    assert_nothing_moved(state, after, metrics)


# The coefficient of KL


def test_the_coefficient_of_kl_is_adapted_by_a_step_that_is_made(toy, adapter, sampled):
    settings = {"kl_estimator": "k3", "kl_coefficient": 0.5, "kl_target": 1e-3, "kl_horizon": 2.0}
    config = toy.config(kl="loss", **settings)
    state = toy.state(config, adapter, kl_coefficient=0.25)  # as adapted by earlier steps
    batch = toy.batch(sampled)
    after, metrics = toy.train(config, state, batch)
    assert metrics["kl/reference_k3"] > 2e-3  # so it grows by a fifth of a half
    assert metrics["kl/coefficient"] == 0.25
    assert after.kl_coefficient == pytest.approx(0.25 * 1.1)
    fixed, _ = toy.train(config, state.replace(kl_coefficient=0.5 * state.kl_coefficient), batch)
    assert not same_bits(moments(after), moments(fixed))  # it is the state's that weighs
    kept, metrics = toy.train(config, state, nudged(batch))
    assert_nothing_moved(state, kept, metrics)
