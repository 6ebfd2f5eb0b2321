"""What one PPO step does to the state, on a dense toy."""

import dataclasses

import jax
import jax.numpy as jnp
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

from orbit_jax.config import PPOConfig
from orbit_jax.model.stream import Stream
from orbit_jax.rl import losses
from orbit_jax.rl.advantages import dr_grpo, gae
from orbit_jax.rl.batch import Batch
from orbit_jax.rl.packing import pack
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.step import StepConfig, _micro_batch_order
from orbit_jax.rl.train_state import TrainState

NAN, INF = np.nan, np.inf


@pytest.fixture(scope="module")
def config(toy: Lab) -> StepConfig:
    """Plain, with the smallest learning rate: one epoch, Dr. GRPO, KL as a metric."""
    return toy.config()


@pytest.fixture(scope="module")
def adapter(toy: Lab):
    return toy.adapter()


@pytest.fixture(scope="module")
def sampled(toy: Lab, adapter) -> Rollouts:
    return toy.generate(adapter)


@pytest.fixture(scope="module")
def state(toy: Lab, config, adapter) -> TrainState:
    return toy.state(config, adapter)


@pytest.fixture(scope="module")
def batch(toy: Lab, sampled) -> Batch:
    return toy.batch(sampled)


@pytest.fixture(scope="module")
def plain(toy: Lab, config, state, batch):
    """State and metrics after one plain step, which other tests compare with."""
    return toy.train(config, state, batch)


# A10, A11: reference, master weights


@pytest.fixture(scope="module")
def with_reference(toy: Lab, adapter):
    """Settings and state of a run that began from an adapter and keeps it as its reference."""
    config = toy.config(kl="loss", kl_estimator="k3", kl_coefficient=0.5)
    return config, toy.state(config, adapter, reference=adapter)


def test_kl_to_the_base_is_exactly_zero_at_the_start(toy, config):
    fresh = toy.adapter(size=0)
    batch = toy.batch(toy.generate(fresh))
    _, metrics = toy.train(config, toy.state(config, fresh), batch)
    assert metrics["kl/reference_k1"] == metrics["kl/reference_k3"] == 0
    assert metrics["update/applied"] == 1


def test_kl_to_a_frozen_first_adapter_is_exactly_zero_at_the_start(toy, batch, with_reference):
    config, state = with_reference
    after, metrics = toy.train(config, state, batch, advantage_fn=junk_at_tool_tokens)
    assert metrics["kl/reference_k1"] == metrics["kl/reference_k3"] == 0
    assert metrics["update/applied"] == 1
    assert same_bits(after.reference, jax.device_get(state.reference))


def test_kl_to_the_base_is_that_of_the_two_models(toy, adapter, batch, plain):
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    on = batch.sampled[0]
    ours, base = (toy.logprobs(a, stream)[on].astype(np.float64) for a in (adapter, None))
    _, metrics = plain
    assert metrics["kl/reference_k1"] == pytest.approx((ours - base).mean(), rel=1e-4)
    k3 = np.expm1(base - ours) - (base - ours)
    assert metrics["kl/reference_k3"] == pytest.approx(k3.mean(), rel=1e-4)
    assert k3.mean() > 0.01


def test_the_initial_adapter_itself_may_be_given_as_reference(toy, batch, with_reference):
    """The state is donated, so the two must not share memory."""
    config, _ = with_reference
    policy = jax.tree.map(jnp.copy, toy.adapter())
    state = toy.state(config, policy, reference=policy)
    args = (batch, losses.ppo_clip, junk_at_tool_tokens)
    state, _ = toy.step(config, toy.base, state, *args)
    assert not any(p.is_deleted() for p in jax.tree.leaves(state.reference))


def test_kl_in_the_loss_is_added_with_its_coefficient(toy, adapter, batch, with_reference, plain):
    config, state = with_reference
    other = toy.adapter(seed=2)
    state = state.replace(reference=other)
    _, metrics = toy.train(config, state, batch, advantage_fn=junk_at_tool_tokens)
    expected = plain[1]["loss/policy"] + 0.5 * metrics["kl/reference_k3"]
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-4)
    assert metrics["kl/reference_k3"] > 0.01


def test_a_tiny_update_moves_the_master_and_not_its_rounded_copy(toy, state, plain):
    after, metrics = plain
    assert metrics["update/applied"] == 1
    moved, rounded, count = 0, 0, 0
    rate = 1e-6
    for old, new in zip(
        jax.tree.leaves(state.policy.params), jax.tree.leaves(after.policy.params), strict=True
    ):
        assert new.dtype == old.dtype == np.float32
        change = np.abs(new - np.asarray(old))
        assert change.max() < 1.5 * rate
        moved += (change > 0.5 * rate).sum()
        rounded += (new.astype(jnp.bfloat16) != np.asarray(old).astype(jnp.bfloat16)).sum()
        count += change.size
    assert moved > 0.99 * count
    assert rounded < 0.01 * count
    for leaf in jax.tree.leaves(after.optimizer):
        assert leaf.dtype in (np.float32, np.int32)


def test_norms_and_sizes_of_updates_are_told_of_each_kind_of_weight(state, plain):
    after, metrics = plain
    norm = lambda tree: np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
    old, new = jax.device_get((state.policy.params, after.policy.params))
    moved = jax.tree.map(np.subtract, new, old)
    for name in ("policy", "policy/down_proj"):  # the only one that the toy adapts
        size, scale = metrics[f"adapter/update_size/{name}"], metrics[f"adapter/norm/{name}"]
        assert scale == pytest.approx(norm(old), rel=1e-5)
        assert size == pytest.approx(norm(moved) / norm(old), rel=1e-2)


def test_the_forward_pass_sees_the_rounded_copy(toy, plain, batch):
    policy = plain[0].policy
    copy = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(np.float32), policy)
    assert not same_bits(policy, copy)
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    np.testing.assert_array_equal(toy.logprobs(policy, stream), toy.logprobs(copy, stream))
    a, b = toy.generate(policy), toy.generate(copy)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert a.fingerprint != b.fingerprint  # the mark is the master's


# T4, T11: masks


def junk_at_tool_tokens(config: PPOConfig, x):
    """Group-relative advantages with values that must never be read outside the mask."""
    advantages, returns = dr_grpo(config, x)
    return jnp.where(x.mask, advantages, NAN), jnp.where(x.mask, returns, INF)


@pytest.fixture(scope="module")
def with_tool_tokens(toy: Lab, sampled) -> Batch:
    """Completions of the kind [gen gen tool tool gen gen ...]."""
    masks = sampled.sampled.copy()
    for row, first in enumerate(sampled.prompt_lengths):
        masks[row, first + 2 : first + 4] = False
    return toy.batch(dataclasses.replace(sampled, sampled=masks))


def test_only_tokens_under_the_mask_count(toy, config, state, batch, with_tool_tokens, plain):
    masked = int(batch.sampled.sum() - with_tool_tokens.sampled.sum())
    assert masked > 40
    after, metrics = toy.train(config, state, with_tool_tokens)
    assert metrics["parity/tokens"] == plain[1]["parity/tokens"] - masked
    assert metrics["parity/max_abs_diff"] == 0
    assert not same_bits(moments(after), moments(plain[0]))


@pytest.mark.parametrize("junk", [1e3, NAN, INF, -INF])
def test_logprobs_outside_the_mask_change_nothing(toy, config, state, with_tool_tokens, junk):
    dirty = with_tool_tokens.replace(
        logprobs=np.where(with_tool_tokens.sampled, with_tool_tokens.logprobs, np.float32(junk))
    )
    clean = toy.train(config, state, with_tool_tokens)
    assert clean[1]["update/applied"] == 1
    assert same_bits(toy.train(config, state, dirty), clean)


def test_advantages_outside_the_mask_change_nothing(
    toy, config, state, with_tool_tokens, with_reference
):
    """NaN advantages outside the mask, and a KL term of value and slope 0."""
    expected, before = toy.train(config, state, with_tool_tokens)
    after, metrics = toy.train(*with_reference, with_tool_tokens, advantage_fn=junk_at_tool_tokens)
    assert metrics["update/applied"] == 1
    assert metrics["loss/policy"] == pytest.approx(before["loss/policy"], rel=1e-5)
    assert_close(moments(after), moments(expected), rtol=1e-3)


def test_a_failed_reward_of_any_kind_masks_its_row(toy, config, state, batch, plain):
    results = [
        toy.train(config, state, rewards_of(batch, {3: failed, 8: failed}))
        for failed in (NAN, INF, -INF)
    ]
    after, metrics = results[0]
    assert metrics["reward/infra_failures"] == 2
    gone = (batch.sampled & np.isin(batch.stream.rows, (3, 8))).sum()
    assert metrics["parity/tokens"] == plain[1]["parity/tokens"] - gone
    assert metrics["update/applied"] == 1
    assert np.isfinite(list(metrics.values())).all()
    assert all(same_bits(result, (after, metrics)) for result in results)


def test_logprobs_of_a_failed_row_are_not_read(toy, config, state, batch):
    failed = rewards_of(batch, {3: NAN})
    junk = np.where(batch.stream.rows == 3, np.float32(NAN), batch.logprobs)
    assert same_bits(
        toy.train(config, state, failed.replace(logprobs=junk)), toy.train(config, state, failed)
    )


# L3, L6: groups without variance, batches without tokens


def test_groups_without_variance_give_exactly_no_gradient(toy, config, state, batch):
    flat = rewards_of(batch, {row: 0.1 * (1 + row // 4) for row in range(Lab.rows)})
    after, metrics = toy.train(config, state, rewards_of(flat, {5: NAN}))
    assert metrics["loss/policy"] == 0
    assert metrics["gradient_norm/policy"] == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(moments(after)))
    assert same_bits(after.policy, jax.device_get(state.policy))
    assert metrics["reward/infra_failures"] == 1


def test_a_fully_masked_batch_moves_neither_the_adapter_nor_its_moments(toy, config, batch, plain):
    state = plain[0]  # its moments are not zero, so that decay would show
    batch = batch.replace(fingerprint=np.uint32(toy.generate(state.policy).fingerprint))
    masked = rewards_of(batch, dict.fromkeys(range(Lab.rows), NAN))
    after, metrics = toy.train(config, state, masked)
    assert_nothing_moved(state, after, metrics)
    assert metrics["loss/policy"] == metrics["gradient_norm/policy"] == 0
    assert metrics["parity/tokens"] == 0
    assert np.isfinite(list(metrics.values())).all()


# L4, T10: micro-batches


@pytest.fixture(scope="module")
def uneven(toy: Lab, adapter) -> Rollouts:
    """100 tokens of loss 0.5 and 900 of loss 0.3, far from evenly spread over micro-batches.

    Two groups: five rows and one that balances their rewards, seventeen and one. The balancing
    rows have no token under the mask.
    """
    sampled = toy.generate(
        adapter, prompts=prompts(6, 8, 10), stop_ids=(), max_completion_tokens=54
    )
    counts = [20] * 5 + [0] + [53] * 16 + [52] + [0]
    masks = np.zeros_like(sampled.sampled)
    for row, count in enumerate(counts):
        masks[row, sampled.prompt_lengths[row] :][:count] = True
    assert masks.sum() == 1000
    assert (masks <= sampled.sampled).all()
    groups = np.int32([0] * 6 + [1] * 18)
    return dataclasses.replace(sampled, sampled=masks, groups=groups)


@pytest.fixture(scope="module")
def by_count(toy: Lab, config, state, uneven) -> dict:
    """Results of the same rollouts in 1, 2 and 4 micro-batches."""
    rewards = np.float32([-0.5] * 5 + [2.5] + [-0.3] * 17 + [5.1])
    return {
        count: toy.train(config, state, toy.batch(uneven, rewards, count)) for count in (1, 2, 4)
    }


def test_the_loss_is_one_mean_over_all_tokens(by_count):
    for _, metrics in by_count.values():
        assert metrics["loss/policy"] == pytest.approx(0.32, rel=1e-5)


def test_the_update_does_not_depend_on_the_micro_batches(by_count):
    one, metrics = by_count[1]
    for count in (2, 4):
        after, others = by_count[count]
        assert others["parity/max_abs_diff"] == 0
        assert others["ratio/mean"] == others["ratio/max"] == 1
        # Each micro-batch's gradient is rounded to bf16 before the sum in f32.
        assert_close(moments(after), moments(one), rtol=2**-7)
        for name in ("entropy", "kl/reference_k3", "gradient_norm/policy"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-2)
        assert others["parity/tokens"] == metrics["parity/tokens"]


# Epochs and minibatches


@pytest.fixture(scope="module")
def epochs(toy: Lab) -> StepConfig:
    return toy.config(epochs=2, minibatches=2, kl="off", learning_rate=1e-3)


def test_epochs_and_minibatches_make_as_many_updates(toy, adapter, sampled, epochs):
    state = toy.state(epochs, adapter)
    after, metrics = toy.train(epochs, state, toy.batch(sampled, micro_batches=4))
    assert metrics["parity/max_abs_diff"] == 0
    assert metrics["parity/extra_forwards"] == 1
    assert metrics["parity/tokens"] == sampled.sampled.sum()
    assert metrics["update/skipped_minibatches"] == 0
    assert metrics["update/applied"] == 1
    assert updates_counted(after) == 4
    assert metrics["ratio/max"] > 1
    assert metrics["kl/rollout_k3"] > 0


def test_one_update_needs_no_extra_forward(plain):
    assert plain[1]["parity/extra_forwards"] == 0


def test_a_minibatch_without_tokens_is_skipped_and_the_others_go_on(toy, adapter, sampled, epochs):
    order = np.asarray(_micro_batch_order(epochs, jnp.int32(0), 4))
    batch = toy.batch(sampled, micro_batches=4)
    lost = [6 * m + r for m in order[0] for r in range(6)]
    after, metrics = toy.train(
        epochs, toy.state(epochs, adapter), rewards_of(batch, dict.fromkeys(lost, NAN))
    )
    skipped = sum(set(ids) == set(order[0]) for ids in order.tolist())
    assert metrics["update/skipped_minibatches"] == skipped > 0
    assert updates_counted(after) == 4 - skipped
    assert metrics["update/applied"] == 1


def test_each_epoch_visits_every_micro_batch_once_in_an_order_of_its_own(toy):
    config = toy.config(epochs=3, minibatches=2)
    orders = [np.asarray(_micro_batch_order(config, jnp.int32(s), 8)) for s in (0, 1)]
    for order in orders:
        assert order.shape == (6, 4)
        epochs = order.reshape(3, 8)
        assert (np.sort(epochs, axis=1) == np.arange(8)).all()
        assert len({tuple(e) for e in epochs}) == 3
    assert not np.array_equal(*orders)


def test_a_gap_is_seen_before_the_first_of_several_updates(toy, adapter, sampled, epochs):
    batch = toy.batch(sampled, micro_batches=4)
    state = toy.state(epochs, adapter)
    after, metrics = toy.train(epochs, state, nudged(batch))
    assert metrics["parity/max_abs_diff"] == pytest.approx(1e-3, rel=1e-2)
    assert_nothing_moved(state, after, metrics)


@pytest.mark.parametrize("junk", [1e3, NAN])
def test_logprobs_outside_the_mask_are_no_gap(toy, adapter, sampled, epochs, junk):
    """With several updates the gap is measured apart from the loss."""
    batch = toy.batch(sampled, micro_batches=4)
    dirty = batch.replace(logprobs=np.where(batch.sampled, batch.logprobs, np.float32(junk)))
    state = toy.state(epochs, adapter)
    clean = toy.train(epochs, state, batch)
    assert clean[1]["update/applied"] == 1
    assert same_bits(toy.train(epochs, state, dirty), clean)


# Updates that must not happen


@pytest.mark.parametrize("by", [1e-3, -1e-6, NAN, INF])
def test_a_gap_deselects_the_update(toy, config, state, batch, by):
    after, metrics = toy.train(config, state, nudged(batch, by))
    assert metrics["parity/max_abs_diff"] != 0
    assert_nothing_moved(state, after, metrics)


def test_a_batch_that_another_adapter_sampled_is_deselected(toy, config, state, batch):
    other = toy.generate(toy.adapter(seed=2)).fingerprint
    after, metrics = toy.train(config, state, batch.replace(fingerprint=np.uint32(other)))
    assert metrics["update/same_adapter"] == 0
    assert metrics["parity/max_abs_diff"] == 0
    assert_nothing_moved(state, after, metrics)


def test_last_steps_rollouts_are_stale(toy, config, batch, plain):
    """The update is too small to show in the log-probs; the fingerprint tells all the same."""
    after, metrics = toy.train(config, plain[0], batch)
    assert metrics["update/same_adapter"] == 0
    assert_nothing_moved(plain[0], after, metrics)


def test_a_gradient_that_is_not_finite_is_deselected(toy, config, state, batch):
    huge = rewards_of(batch, {0: 3e38, 1: -3e38})
    after, metrics = toy.train(config, state, huge)
    assert metrics["reward/infra_failures"] == 0
    assert metrics["update/skipped_minibatches"] == 1
    assert_nothing_moved(state, after, metrics)


def test_an_update_that_would_not_be_finite_is_deselected(toy, batch, adapter):
    config = toy.config(b2=1.0)  # divides by a bias correction of 0
    state = toy.state(config, adapter)
    after, metrics = toy.train(config, state, batch)
    assert np.isfinite(metrics["gradient_norm/policy"])
    assert_nothing_moved(state, after, metrics)


# Functions of a reader's own


def bare_loss(config: PPOConfig, *arguments):
    return losses.ppo_clip(config, *arguments)[0]


def test_a_loss_without_metrics_is_one_clear_error(toy, config, state, batch):
    with pytest.raises(ValueError, match="loss_fn must return"):
        toy.train(config, state, batch, bare_loss)


def mean_loss(config: PPOConfig, *arguments):
    token_loss, extra = losses.ppo_clip(config, *arguments)
    return token_loss.mean(), extra


def advantages_of_rows(config: PPOConfig, experience):
    advantages, returns = dr_grpo(config, experience)
    return advantages[:, :1], returns


@pytest.mark.parametrize(
    ("loss_fn", "advantage_fn"),
    [(mean_loss, dr_grpo), (losses.ppo_clip, advantages_of_rows)],
)
def test_what_is_not_one_number_per_token_is_refused(
    toy, config, state, batch, loss_fn, advantage_fn
):
    with pytest.raises(AssertionError, match="shape"):
        toy.train(config, state, batch, loss_fn, advantage_fn)


# Corrected: importance weights where log-probs cannot agree


@pytest.fixture(scope="module")
def corrected(toy: Lab) -> StepConfig:
    return toy.config(exact=False, kl="reward", kl_coefficient=0.1)


def test_a_gap_is_corrected_by_importance_weights_where_exactness_is_not_asked(
    toy, adapter, batch, corrected
):
    """Had the sampler drawn with 1/1.5 (1/8) of the trainer's probability, tokens weigh 1.5 (2)."""
    state = toy.state(corrected, adapter)
    expected, _ = toy.train(corrected, state, batch)
    for factor, weight in ((1.5, 1.5), (8.0, 2.0)):
        logprobs = np.where(batch.sampled, batch.logprobs - np.float32(np.log(factor)), 0)
        after, metrics = toy.train(corrected, state, batch.replace(logprobs=logprobs))
        assert metrics["update/applied"] == 1
        assert metrics["parity/max_abs_diff"] == pytest.approx(np.log(factor), rel=1e-4)
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
        scaled = jax.tree.map(lambda m, w=weight: w * m, moments(expected))
        assert_close(moments(after), scaled, rtol=2e-2)


def test_kl_in_the_reward_lowers_it_token_by_token(toy, adapter, batch, corrected):
    """With equal rewards a row is as good as its KL to the base is low."""
    flat = rewards_of(batch, dict.fromkeys(range(Lab.rows), 1.0))
    _, metrics = toy.train(corrected, toy.state(corrected, adapter), flat)
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    on = batch.sampled[0]
    ours, base = (toy.logprobs(a, stream)[on].astype(np.float64) for a in (adapter, None))
    score = -0.1 * np.bincount(stream.rows[on], ours - base, Lab.rows).reshape(6, 4)
    advantages = (score - score.mean(axis=1, keepdims=True)).reshape(-1)
    assert metrics["loss/policy"] == pytest.approx(-advantages[stream.rows[on]].mean(), rel=1e-3)


def test_rollouts_of_an_older_adapter_are_corrected_too(toy, adapter, batch, corrected):
    """Where exactness is asked they are refused: the ratio would be that of another policy."""
    state = toy.state(corrected, adapter)
    older = batch.replace(fingerprint=np.uint32(batch.fingerprint + 1))
    expected, metrics = toy.train(corrected, state, batch)
    after, stale = toy.train(corrected, state, older)
    assert (metrics["update/same_adapter"], stale["update/same_adapter"]) == (1, 0)
    assert stale["update/applied"] == 1
    assert same_bits(after, expected)
    assert stale["correction/weight_mean"] == pytest.approx(1, abs=1e-6)
    assert stale["correction/dropped"] == 0


# T5: what stands where


def test_logprobs_and_values_stand_at_the_token_that_follows_what_they_saw(toy, adapter):
    """Against each prefix of a text run by itself, its last state turned into words and a value."""
    text = np.random.default_rng(0).integers(1, 64, 8).tolist()

    def stream(pieces: list) -> Stream:
        part = pack(pieces, Lab.rows, 1, Lab.rows * Lab.slots)
        return Stream(part.tokens, part.rows, part.positions, Lab.rows, Lab.slots)

    prefixes, whole = stream([(t, 0, text[:t]) for t in range(1, 9)]), stream([(0, 0, text)])
    critic = toy.critic().replace(adapter=adapter, head=jnp.linspace(-1, 1, 32))
    words, hidden = (
        np.asarray(x, np.float64) for x in toy.words(toy.model, toy.base, adapter, prefixes)
    )
    logprobs = toy.logprobs(adapter, whole, temperature=0.5)
    before, after = toy.values(toy.config(), toy.base, critic, whole)
    for t in range(1, 8):
        last = np.flatnonzero((prefixes.rows == t) & (prefixes.positions == t - 1)).item()
        tempered = words[last] / 0.5
        expected = tempered[text[t]] - np.log(np.exp(tempered).sum())
        assert logprobs[t] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        value = hidden[last] @ np.asarray(critic.head, np.float64).astype(jnp.bfloat16)
        assert before[t] == pytest.approx(float(value), rel=1e-3, abs=1e-3)
        assert after[t - 1] == before[t]


# The critic


def test_a_critic_learns_a_constant_reward(toy, adapter, batch):
    """The policy stands still (rate 0), so that one batch serves for all steps."""
    config = toy.config(
        advantage="gae", kl="off", learning_rate=0.0, critic_learning_rate=0.03, b2=0.95
    )
    first = state = toy.state(config, adapter, critic=toy.critic())
    batch = rewards_of(batch, dict.fromkeys(range(Lab.rows), 1.0))
    history = []
    for _ in range(40):
        state, metrics = toy.train(config, state, batch, advantage_fn=gae)
        assert metrics["update/applied"] == 1
        assert metrics["parity/max_abs_diff"] == 0
        history.append(metrics)
    assert history[0]["loss/value"] == pytest.approx(0.5)
    assert history[0]["value/mean"] == 0
    assert history[-1]["loss/value"] < 0.05
    assert history[-1]["value/mean"] == pytest.approx(1, abs=0.1)
    assert history[-1]["value/return"] == pytest.approx(1, abs=1e-5)
    assert same_bits(state.policy, jax.device_get(first.policy))
    assert not same_bits(state.critic.adapter, jax.device_get(first.critic.adapter))


# Memory


def test_the_memory_of_the_state_is_used_again(toy, config, state, batch):
    state = jax.tree.map(jnp.copy, state)
    leaf = lambda s: jax.tree.leaves(s.policy.params)[0]  # noqa: E731
    before = leaf(state).unsafe_buffer_pointer()
    args = (batch, losses.ppo_clip, dr_grpo)
    after, _ = toy.step(config, toy.base, state, *args)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.policy, state.optimizer)))
    assert leaf(after).unsafe_buffer_pointer() == before
