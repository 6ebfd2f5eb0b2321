import dataclasses

import numpy as np
import pytest

from orbit_jax.config import Config, from_config_dict
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.rl.batch import Batch, make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import EOS, LENGTH

GEN, TOOL = True, False


def rollouts(rows: list[tuple[int, list[bool]]], width: int = 16, **given) -> Rollouts:
    """Rows of (prompt length, which later tokens were drawn by the model), with junk behind."""
    count = len(rows)
    rng = np.random.default_rng(0)
    sampled = rng.random((count, width)) < 0.5
    lengths = []
    for i, (prompt, drawn) in enumerate(rows):
        lengths.append(prompt + len(drawn))
        sampled[i, :prompt] = False
        sampled[i, prompt : lengths[-1]] = drawn
    fields = {
        "tokens": rng.integers(1, 64, (count, width)).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "prompt_lengths": np.array([p for p, _ in rows], np.int32),
        "sampled": sampled,
        "logprobs": -rng.random((count, width)).astype(np.float32),
        "status": np.full(count, EOS, np.int32),
        "groups": np.arange(count, dtype=np.int32) // 2,
        "temperature": 0.7,
        "filtered": False,
        "fingerprint": 2**32 - 5,
    }
    return Rollouts(**fields | given)


def pack(sampled: Rollouts, micro_batches: int = 1, data: int = 1, size: int = 64) -> Batch:
    model = ModelConfig(*["qwen3", *[0] * 12, ()], mesh=MeshShape(1, 1))
    # Only the number of shards is read; nothing is placed.
    object.__setattr__(model.mesh, "data", 1)
    del data
    rewards = np.arange(len(sampled.lengths))
    return make_batch(model, sampled, rewards, micro_batches, (size,))
