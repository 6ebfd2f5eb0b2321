"""The walk of one batch through the code, with the shapes that README tells.

`TOLD` is that table: what there is, its shape in letters, and in numbers in the `test` variant.
"""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from configs import tiny_moe  # noqa: E402
from orbit_jax import parity, startup  # noqa: E402
from orbit_jax.config import Config, from_config_dict  # noqa: E402
from orbit_jax.model import transformer  # noqa: E402
from orbit_jax.rl import objective  # noqa: E402
from orbit_jax.rl.advantages import grpo  # noqa: E402
from orbit_jax.rl.batch import Batch, make_batch, token_buckets  # noqa: E402
from orbit_jax.rl.losses import ppo_clip  # noqa: E402
from orbit_jax.rl.rollouts import Rollouts  # noqa: E402
from orbit_jax.rl.sampler import STOP_REASONS  # noqa: E402
from orbit_jax.rl.step import ppo_step  # noqa: E402

TOLD = {
    "packed weights of experts": ("L E F D/2", (3, 8, 96, 64)),
    "their scales": ("L E F D/G", (3, 8, 96, 4)),
    "factor a of LoRA there": ("L E R D", (3, 8, 16, 128)),
    "factor b of LoRA there": ("L E F R", (3, 8, 96, 16)),
    "cache of keys": ("L B S K head", (3, 16, 64, 2, 32)),
    "tokens and log-probs sampled": ("B S", (16, 64)),
    "rewards and groups": ("M B/M", (2, 8)),
    "stream of a micro-batch": ("M T", (2, 448)),
    "advantages": ("M T", (2, 448)),
    "residual stream": ("T D", (448, 128)),
    "queries": ("T H head", (448, 4, 32)),
    "keys by row": ("B/M K S head", (8, 2, 64, 32)),
    "tokens per expert": ("L E", (3, 8)),
    "log-probs": ("T", (448,)),
    "loss": ("T", (448,)),
}


@pytest.fixture(scope="module")
def config() -> Config:
    config = tiny_moe.get_config("test")
    config.base.path = str(ROOT / config.base.path)
    config.base.working_copy = "never"
    config.run.compilation_cache = False
    return from_config_dict(config)


@pytest.fixture(scope="module")
def seen(config) -> dict[str, tuple[int, ...]]:
    """The shapes, as the code makes them; nothing is compiled but what loads the base."""
    frozen = startup.load(config)
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)
    programs = parity.build("fast", frozen.model, config)
    batch = batch_of(config, programs.model)
    experts, adapted = (
        tree["layers"][0]["mlp"]["experts"] for tree in (frozen.base, state.policy.params)
    )
    found = {
        "packed weights of experts": experts["gate_proj"].codes,
        "their scales": experts["gate_proj"].scales,
        "factor a of LoRA there": adapted["gate_proj"]["a"],
        "factor b of LoRA there": adapted["gate_proj"]["b"],
        "cache of keys": slots.cache.keys,
        "tokens and log-probs sampled": slots.logprobs,
        "rewards and groups": batch.rewards,
        "stream of a micro-batch": batch.stream.tokens,
    }

    def advantage(config, x):
        found["advantages"] = grpo(config, x)[0]
        return grpo(config, x)

    def loss(config, x):
        found["log-probs"] = x.logprobs
        found["loss"] = ppo_clip(config, x)[0]
        return ppo_clip(config, x)

    def attend(config, layout, scoring, q, keys, values):
        found.update({"queries": q, "keys by row": keys})
        return real_attend(config, layout, scoring, q, keys, values)

    def embed(*arguments):
        found["residual stream"] = real_embed(*arguments)
        return found["residual stream"]

    def apply(*arguments):
        out = real_apply(*arguments)
        found["tokens per expert"] = out[2]
        return out

    real_attend, real_embed, real_apply = transformer.attend, transformer._embed, objective.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "attend", attend)
        patch.setattr(transformer, "_embed", embed)
        patch.setattr(objective, "apply", apply)
        step = functools.partial(ppo_step, loss_fn=loss, advantage_fn=advantage)
        jax.eval_shape(functools.partial(step, programs.step), frozen.base, state, batch)
    return {name: value.shape for name, value in found.items()}


def batch_of(config: Config, model) -> Batch:
    """Of rollouts with prompts of seven tokens and completions of eight."""
    rows, width = config.rows, config.num_slots
    places = np.tile(np.arange(width), (rows, 1))
    rollouts = Rollouts(
        tokens=np.repeat(np.arange(rows, dtype=np.int32) // 2, width).reshape(rows, width),
        lengths=np.full(rows, 15),
        prompt_lengths=np.full(rows, 7),
        sampled=(places >= 7) & (places < 15),
        logprobs=np.zeros((rows, width), np.float32),
        status=np.full(rows, STOP_REASONS.index("eos")),
        groups=np.arange(rows) // config.sampler.group_size,
        temperature=1.0,
        filtered=False,
        fingerprint=0,
        calls=1,
        decode_steps=8,
    )
    rewards = np.arange(rows) % 2
    return make_batch(model, rollouts, rewards, config.ppo.micro_batches, token_buckets(config))


def test_each_shape_is_the_one_that_is_told(seen):
    assert seen == {name: numbers for name, (_, numbers) in TOLD.items()}


def test_the_letters_stand_for_those_numbers(config):
    model = startup._source(config).config()
    (bucket,) = token_buckets(config)
    letters = {
        "B": config.rows,
        "S": config.num_slots,
        "D": model.hidden_size,
        "H": model.num_heads,
        "K": model.num_kv_heads,
        "E": model.num_experts,
        "F": model.expert_size,
        "G": 32,
        "R": config.adapter.rank,
        "L": model.num_layers,
        "M": config.ppo.micro_batches,
        "T": bucket.tokens,
        "head": model.head_dim,
    }

    def size(word: str) -> int:
        letter, _, divisor = word.partition("/")
        return letters[letter] // (letters.get(divisor) or int(divisor or 1))

    for name, (shape, numbers) in TOLD.items():
        assert tuple(map(size, shape.split())) == numbers, name


@pytest.mark.parametrize("name", TOLD)
def test_the_readme_tells_it_in_letters_and_in_numbers(name):
    section = (ROOT / "README.md").read_text().partition("## One batch through the code")[2]
    section = section.partition("\n## ")[0]
    shape, numbers = TOLD[name]
    letters = shape.replace("head", "32").split()
    assert f"[{', '.join(letters)}]" in section
    assert f"[{', '.join(map(str, numbers))}]" in section
