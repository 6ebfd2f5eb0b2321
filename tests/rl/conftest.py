"""One tiny model with its two programs, compiled once for all tests of `rl`."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax import compile
from orbit_jax.adapters.adapter import Adapter, attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.config import OptimizerConfig, PPOConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.stream import Stream
from orbit_jax.rl import sampler, step
from orbit_jax.rl.advantages import group_relative
from orbit_jax.rl.batch import Batch, make_batch
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import Rollouts, generate
from orbit_jax.rl.sampler import SamplerState, empty_state
from orbit_jax.rl.step import StepConfig, TrainState, init_state, ppo_step

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    tie_word_embeddings=True,
    qk_norm=True,
    sparse=(True, True),
    num_experts=4,
    top_k=2,
    expert_size=32,
    norm_topk_prob=True,
)
ROWS, SLOTS, STOPS = 24, 64, 4
LEARNING_RATE = 1e-6


class Lab:
    """The tiny model, its programs, and short ways to run them."""

    def __init__(self):
        options = compile.options(MODEL.recipe)
        self.model = MODEL
        self.base = jax.jit(lambda key: freeze(init_weights(MODEL, key, 1.5)))(jax.random.key(0))
        self.sample = compile.jit(
            sampler.sample,
            options,
            static_argnames=("config", "filters"),
            donate_argnames=("state",),
        )
        self.step = compile.jit(
            ppo_step,
            options,
            static_argnames=("config", "loss_fn", "advantage_fn"),
            donate_argnames=("state",),
        )
        self._forward = compile.jit(step._forward, options, static_argnames=("config",))
        self._slots: dict[int, SamplerState] = {}

    def adapter(self, seed: int = 1, size: float = 0.1, **given) -> Adapter:
        """A LoRA adapter with `size` times normal noise on all parameters; 0 leaves it fresh."""
        adapter = attach(LoRA(8, 16.0), jax.random.key(seed), self.base, **given)
        leaves, treedef = jax.tree.flatten(adapter.params)
        keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
        noisy = [
            p + size * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys, strict=True)
        ]
        return adapter.replace(params=jax.tree.unflatten(treedef, noisy))

    def generate(self, adapter: Adapter | None, slots: int = ROWS, **given) -> Rollouts:
        """Rollouts of `PROMPTS`, four samples each, unless told otherwise."""
        state = self._slots.pop(slots, None) or empty_state(self.model, slots, SLOTS, STOPS)
        asked = dict(
            prompts=prompts(),
            group_size=4,
            max_completion_tokens=40,
            stop_ids=(0, 9),
            temperature=1.0,
            seed=0,
            step=0,
        )
        asked |= given
        rollouts, self._slots[slots] = generate(
            self.sample, self.model, self.base, adapter, state, **asked
        )
        return rollouts

    def batch(self, rollouts: Rollouts, rewards=None, micro_batches: int = 1) -> Batch:
        """A batch with random rewards unless some are given, always in the largest bucket."""
        if rewards is None:
            rewards = np.random.default_rng(0).random(len(rollouts.lengths))
        bucket = rollouts.tokens.size // micro_batches
        return make_batch(self.model, rollouts, rewards, micro_batches, (bucket,))

    def config(self, **given) -> StepConfig:
        """Step settings; the fields of all three records are found by their names."""

        def pick(kind: type, **defaults):
            names = {f.name for f in dataclasses.fields(kind)}
            return defaults | {k: given.pop(k) for k in list(given) if k in names}

        ppo = PPOConfig(**pick(PPOConfig, kl="metric"))
        optimizer = OptimizerConfig(
            **pick(
                OptimizerConfig,
                learning_rate=LEARNING_RATE,
                warmup_steps=0,
                max_gradient_norm=1e9,
            )
        )
        return StepConfig(self.model, ppo, optimizer, **given)

    def train(
        self,
        config: StepConfig,
        state: TrainState,
        batch: Batch,
        loss_fn=ppo_clip,
        advantage_fn=group_relative,
    ) -> tuple[TrainState, dict[str, np.ndarray]]:
        """One step, on a copy of `state`; both results lie on the host."""
        state = jax.tree.map(jnp.array, state)
        return jax.device_get(self.step(config, self.base, state, batch, loss_fn, advantage_fn))

    def state(self, config: StepConfig, adapter: Adapter, critic=None, reference=None):
        return init_state(config, adapter, critic, reference)

    def logprobs(self, adapter: Adapter | None, stream: Stream, temperature=1.0) -> np.ndarray:
        """The trainer's own log-probs [N] of a stream, at the tokens that they are of."""
        config = StepConfig(self.model, PPOConfig(), OptimizerConfig())
        args = (config, self.base, adapter, stream, np.float32(temperature))
        return np.asarray(self._forward(*args)[0])


@functools.cache
def _lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def lab() -> Lab:
    return _lab()


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 64, rng.integers(3, 13)).tolist() for _ in range(count)]
