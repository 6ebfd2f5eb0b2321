import dataclasses

import numpy as np
import pytest
from lab import MOE

from orbit_jax import mesh
from orbit_jax.config import from_config_dict
from orbit_jax.model.config import MeshShape
from orbit_jax.rl.batch import Batch, Bucket, make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import EOS, LENGTH

PAD = 0
GEN, TOOL = True, False


def rollouts(*rows: tuple[int, list[bool]], **given) -> Rollouts:
    """Rows of (prompt length, which later tokens the model drew), with junk behind their end."""
    count, width = len(rows), 16
    rng = np.random.default_rng(0)
    sampled = rng.random((count, width)) < 0.5
    for i, (prompt, drawn) in enumerate(rows):
        sampled[i, :prompt] = False
        sampled[i, prompt : prompt + len(drawn)] = drawn
    fields = {
        "tokens": rng.integers(1, 64, (count, width)).astype(np.int32),
        "lengths": np.array([p + len(d) for p, d in rows], np.int32),
        "prompt_lengths": np.array([p for p, _ in rows], np.int32),
        "sampled": sampled,
        "logprobs": -1 - rng.random((count, width)).astype(np.float32),
        "status": np.full(count, EOS, np.int32),
        "groups": np.arange(count, dtype=np.int32) // 2,
        "temperature": 0.7,
        "filtered": False,
        "fingerprint": 2**32 - 5,
        "calls": 1,
        "decode_steps": 2,
    }
    return Rollouts(**fields | given)


def pack(sampled: Rollouts, micro_batches: int = 1, size: int = 48) -> Batch:
    rewards = np.arange(len(sampled.lengths)) + 0.5
    return make_batch(MOE, sampled, rewards, micro_batches, (Bucket(size, size),))


def test_only_generated_tokens_are_under_the_mask():
    batch = pack(rollouts((2, [GEN, GEN, TOOL, TOOL, GEN])))
    assert batch.sampled[0, :7].astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert not batch.sampled[0, 7:].any()


def test_a_sampled_eos_is_trained_on_and_padding_is_not_though_their_ids_are_equal():
    sampled = rollouts((2, [GEN, GEN]), (3, [GEN]))
    sampled.tokens[0, 3] = sampled.tokens[1, 3] = PAD
    batch = pack(sampled)
    assert (batch.stream.tokens[0, [3, 7]] == PAD).all()
    assert batch.sampled[0, [3, 7]].all()
    assert (batch.stream.tokens[0, 8:] == PAD).all()
    assert not batch.sampled[0, 8:].any()


def test_every_token_keeps_its_id_its_place_and_its_logprob():
    sampled = rollouts((1, [GEN] * 4), (4, [GEN, TOOL, GEN]), (2, []), (3, [GEN] * 13))
    batch = pack(sampled, micro_batches=2)
    seen = 0
    for m, n in np.argwhere(batch.stream.rows < batch.stream.num_rows):
        row, at = 2 * m + batch.stream.rows[m, n], batch.stream.positions[m, n]
        assert batch.stream.tokens[m, n] == sampled.tokens[row, at]
        assert batch.sampled[m, n] == sampled.sampled[row, at]
        assert batch.logprobs[m, n] == (
            sampled.logprobs[row, at] if sampled.sampled[row, at] else 0
        )
        seen += 1
    assert seen == sampled.lengths.sum()
    assert batch.sampled.sum() == 4 + 2 + 13
    assert batch.rewards.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert batch.groups.tolist() == [[0, 0], [1, 1]]


def test_a_group_s_prompt_is_there_once_for_rows_that_lie_together():
    sampled = rollouts(*[(4, [GEN] * 3)] * 8, groups=np.zeros(8, np.int32))
    sampled.tokens[:, :4] = [5, 6, 7, 8]
    batch = pack(sampled, micro_batches=2)
    for m in range(2):
        rows, positions = batch.stream.rows[m], batch.stream.positions[m]
        assert [positions[rows == r].tolist() for r in range(4)] == [[*range(7)]] + [
            [3, 4, 5, 6]
        ] * 3
        assert batch.stream.prefix[m].tolist() == [0, 0, 0, 0]
    assert batch.sampled.sum() == 8 * 3
    assert batch.stream.max_sharers == 7


def test_prompts_that_differ_are_not_shared_whatever_the_group_says():
    sampled = rollouts(*[(4, [GEN] * 3)] * 4, groups=np.zeros(4, np.int32))
    batch = pack(sampled)
    assert batch.stream.prefix.tolist() == [[0, 1, 2, 3]]


def test_no_more_rows_share_a_prompt_than_a_group_has():
    sampled = rollouts(*[(4, [GEN])] * 6)  # three groups of two rows
    sampled.tokens[:, :4] = 5
    batch = pack(sampled)
    assert batch.stream.prefix.tolist() == [[0, 0, 2, 2, 4, 4]]
    assert batch.stream.max_sharers == 1


def test_rows_that_ended_at_their_limit_are_marked():
    sampled = rollouts((1, [GEN]), (1, [GEN]), status=np.array([LENGTH, EOS], np.int32))
    assert pack(sampled).truncated.tolist() == [[True, False]]


def test_temperature_and_fingerprint_travel_with_the_batch():
    batch = pack(rollouts((1, [GEN])))
    assert batch.temperature == np.float32(0.7)
    assert batch.fingerprint == 2**32 - 5
    assert batch.fingerprint.dtype == np.uint32


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"filtered": True}])
def test_training_on_greedy_or_filtered_samples_is_refused_with_a_reason(given):
    with pytest.raises(ValueError, match="for evaluation; train on samples of the whole"):
        pack(rollouts((1, [GEN]), **given))


def test_a_config_that_would_train_on_greedy_samples_is_refused():
    with pytest.raises(ValueError, match=r"sampler\.temperature=0\.0: training on greedy"):
        from_config_dict({"sampler": {"temperature": 0.0}})


def test_the_smallest_bucket_that_holds_the_fullest_micro_batch_is_taken():
    sampled = rollouts((1, [GEN]), (1, [GEN]), (2, [GEN] * 14), (2, [GEN] * 14))
    batch = make_batch(
        MOE, sampled, np.zeros(4), 2, (Bucket(64, 32), Bucket(16, 16), Bucket(32, 32))
    )
    assert batch.stream.tokens.shape == (2, 32)
    with pytest.raises(ValueError, match="32 tokens a shard do not fit"):
        make_batch(MOE, sampled, np.zeros(4), 2, (Bucket(16, 16),))


def test_only_tokens_before_sampled_ones_are_scored():
    sampled = rollouts((2, [GEN, TOOL, GEN]), (3, [GEN]), (4, []))
    batch = make_batch(MOE, sampled, np.zeros(3), 1, (Bucket(32, 16),))
    (drawn,) = (np.flatnonzero(batch.sampled[0]),)
    assert batch.scored[0].tolist() == [*(drawn - 1), *[32] * 13]
    with pytest.raises(ValueError, match="make at most 2"):
        make_batch(MOE, sampled, np.zeros(3), 1, (Bucket(32, 2),))


@pytest.mark.parametrize(("micro_batches", "data"), [(1, 1), (2, 1), (8, 1), (16, 1), (2, 2)])
def test_the_largest_bucket_holds_any_batch_and_no_more_than_needed(
    micro_batches, data, monkeypatch
):
    monkeypatch.setattr(mesh, "place_micro_batches", lambda _, tree: tree)  # one device will do
    asked = {"prompts_per_step": 6, "group_size": 8, "max_prompt_tokens": 24}
    config = from_config_dict(
        {
            "sampler": asked | {"max_completion_tokens": 40},
            "ppo": {"micro_batches": micro_batches, "token_buckets": (0.5, 1.0)},
            "mesh": {"data": data},
        }
    )
    rows = config.rows
    tokens = np.random.default_rng(0).integers(1, 64, (rows, 64)).astype(np.int32)
    tokens[:, :24] = tokens[:: config.sampler.group_size].repeat(8, axis=0)[:, :24]
    full = Rollouts(
        tokens=tokens,
        lengths=np.full(rows, 64, np.int32),
        prompt_lengths=np.full(rows, 24, np.int32),
        sampled=np.arange(64) >= np.full((rows, 1), 24),
        logprobs=np.zeros((rows, 64), np.float32),
        status=np.full(rows, EOS, np.int32),
        groups=np.arange(rows, dtype=np.int32) // 8,
        temperature=1.0,
        filtered=False,
        fingerprint=0,
        calls=1,
        decode_steps=2,
    )
    model = dataclasses.replace(MOE, mesh=MeshShape(data, 1))
    small, large = token_buckets(config)
    assert small.tokens < large.tokens
    batch = make_batch(model, full, np.zeros(rows), micro_batches, (small, large))
    valid = (batch.stream.rows < batch.stream.num_rows).sum(axis=1)
    assert batch.stream.tokens.shape[1] == large.tokens
    assert large.tokens - valid.max() < 16 * data
    assert (batch.scored < large.tokens // data).sum() == batch.sampled.sum() == rows * 40
