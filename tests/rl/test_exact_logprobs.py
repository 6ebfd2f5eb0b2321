"""Sampler and trainer agree bit for bit, on a mixture of experts, for each method of adapters."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from lab import Lab, prompts

from orbit_jax.model.stream import Stream
from orbit_jax.rl import batch
from orbit_jax.rl.packing import pack
from orbit_jax.rl.rollouts import Rollouts

EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@pytest.fixture(scope="module", params=["lora", pytest.param("oft", marks=pytest.mark.long)])
def moe(request, moe: Lab, rotated: Lab) -> Lab:
    return moe if request.param == "lora" else rotated


@pytest.fixture(scope="module")
def adapter(moe: Lab):
    return moe.adapter()


@pytest.fixture(scope="module")
def sampled(moe: Lab, adapter) -> Rollouts:
    return moe.generate(adapter)


def trainer_logprobs(moe: Lab, adapter, sampled: Rollouts) -> np.ndarray:
    """The trainer's log-probs at the sampled places of a packed batch."""
    batch = moe.batch(sampled)
    stream = jax.tree.map(lambda x: x[0], batch.stream)
    return moe.logprobs(adapter, stream, sampled.temperature)[batch.sampled[0]]


def packed_logprobs(sampled: Rollouts) -> np.ndarray:
    return np.concatenate([sampled.logprobs[i, on] for i, on in enumerate(sampled.sampled)])


# A1, A3: the adapter that is asked for is the one that samples


def test_the_sampler_runs_the_adapter_and_agrees_with_the_trainer_exactly(moe, adapter, sampled):
    ours = packed_logprobs(sampled)
    np.testing.assert_array_equal(ours, trainer_logprobs(moe, adapter, sampled))
    base = trainer_logprobs(moe, moe.adapter(size=0), sampled)
    assert (ours != base).all()
    assert np.abs(ours - base).mean() > 0.1


def test_an_adapter_on_experts_alone_changes_what_is_sampled(moe):
    ours = moe.generate(moe.adapter(targets=EXPERTS))
    fresh = trainer_logprobs(moe, moe.adapter(size=0), ours)
    assert (packed_logprobs(ours) != fresh).mean() > 0.99


# A2: nothing that changes during a run is a constant of the program


def test_another_adapter_or_temperature_changes_the_output_and_retraces_nothing(
    moe, adapter, sampled
):
    traces = moe.sample.traces
    other = moe.adapter(seed=2)
    for changed in (moe.generate(other), moe.generate(adapter, temperature=0.6)):
        assert not np.array_equal(changed.tokens, sampled.tokens)
        assert not np.array_equal(changed.logprobs, sampled.logprobs)
    assert moe.sample.traces == traces


def test_the_fingerprint_tells_adapters_apart(moe, adapter, sampled):
    nudged = jax.tree.map(lambda p: p, adapter)
    params = nudged.params["layers"][0]["mlp"]["experts"]["up_proj"]
    name = max(params)  # b of LoRA
    params[name] = params[name].at[1, 2, 3, 4].add(1e-6)
    assert moe.generate(adapter, step=5).fingerprint == sampled.fingerprint
    assert moe.generate(nudged).fingerprint != sampled.fingerprint


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.7, 1.3])
def test_before_the_first_update_the_ratio_is_exactly_one(moe, adapter, temperature):
    config = moe.config()
    state = moe.state(config, adapter)
    batch = moe.batch(moe.generate(adapter, temperature=temperature))
    _, metrics = moe.train(config, state, batch)
    assert metrics["parity/max_abs_diff"] == 0
    assert metrics["parity/tokens"] == batch.sampled.sum() > 300
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1
    assert metrics["update/applied"] == 1
    assert metrics["kl/reference_k3"] > 0.01  # to the base, from which the adapter differs
    assert moe.step.traces == 1


def test_a_run_of_three_steps_agrees_in_each_and_traces_each_program_once(moe):
    """Lengths and prompts differ from step to step; shapes fall into one bucket."""
    config = moe.config()
    state = moe.state(config, moe.adapter(seed=4))
    moe.train(config, state, moe.batch(moe.generate(state.policy)))
    traces = moe.sample.traces, moe.step.traces
    lengths = set()
    for step in range(3):
        asked = prompts(6, 8 + step, 16, seed=step)
        sampled = moe.generate(state.policy, prompts=asked, step=step)
        lengths.add(int(sampled.lengths.sum()))
        before = state.policy
        state, metrics = moe.train(config, state, moe.batch(sampled))
        assert metrics["parity/max_abs_diff"] == 0
        assert metrics["update/applied"] == 1
        assert not np.array_equal(
            jax.tree.leaves(before.params)[0], jax.tree.leaves(state.policy.params)[0]
        )
    assert len(lengths) == 3
    assert (moe.sample.traces, moe.step.traces) == traces


# T6: where a row lies changes nothing


def test_a_row_has_the_same_logprobs_alone_and_in_any_company(moe, adapter):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 64, n).tolist() for n in (3, 7, 12)]

    def logprobs(order: list[int], num_rows: int = 6, first: int = 0):
        """Of each row, the texts of `order` lying behind `first` tokens of padding."""
        pieces = [(row, 0, texts[i]) for row, i in enumerate(order)]
        part = pack(pieces, num_rows, 1, num_rows * Lab.slots)
        stream = Stream(part.tokens, part.rows, part.positions, num_rows, Lab.slots)
        stream = jax.tree.map(lambda x: np.roll(x, first), stream)
        out = moe.logprobs(adapter, stream)
        return {i: out[stream.rows == row][1:] for row, i in enumerate(order)}

    alone = {}
    for i in range(3):
        alone |= logprobs([i])
    assert [len(alone[i]) for i in range(3)] == [2, 6, 11]
    companies = [
        logprobs([0, 1, 2]),
        logprobs([2, 0, 1]),
        logprobs([1, 2, 0], first=362),  # padded on the left
        logprobs([0, 1, 2], first=13),  # and on both sides
        logprobs([2, 1, 0], num_rows=Lab.rows),
    ]
    for company in companies:
        for i, found in company.items():
            np.testing.assert_array_equal(found, alone[i])


def test_a_prompt_shared_by_its_rows_gives_the_numbers_of_one_in_each(moe, adapter, monkeypatch):
    """Log-probs to the last bit, gradients to the rounding of what is summed in another order."""
    sampled = moe.generate(adapter, prompts=prompts(6, 20, 24), max_completion_tokens=12)
    config = moe.config()
    batches = [moe.batch(sampled)]
    monkeypatch.setattr(batch, "_leaders", lambda rollouts, *_: np.arange(len(rollouts.lengths)))
    batches.append(moe.batch(sampled))
    shared, apart = ((b.stream.rows < b.stream.num_rows).sum() for b in batches)
    assert shared < 0.6 * apart
    gradients = []
    for b in batches:
        after, metrics = moe.train(config, moe.state(config, adapter), b)
        assert metrics["parity/max_abs_diff"] == 0
        moments = optax.tree.get(after.optimizer.inner_states["policy"], "mu")
        gradients.append(jax.tree.leaves(moments))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.02 * np.abs(other).max())


# T10: so does how a batch is cut


def test_logprobs_do_not_depend_on_the_micro_batch(moe, adapter, sampled):
    batch = moe.batch(sampled, micro_batches=4)
    parts = []
    for m in range(4):
        stream = jax.tree.map(lambda x, m=m: x[m], batch.stream)
        parts.append(moe.logprobs(adapter, stream)[batch.sampled[m]])
    np.testing.assert_array_equal(np.concatenate(parts), trainer_logprobs(moe, adapter, sampled))


def test_a_row_of_another_temperature_has_other_logprobs(moe, adapter, sampled):
    """The log-probs of the trainer follow the temperature that was sampled with."""
    cooler = dataclasses.replace(sampled, temperature=0.5)
    at_half, at_one = (trainer_logprobs(moe, adapter, s) for s in (cooler, sampled))
    assert (at_half != at_one).all()
