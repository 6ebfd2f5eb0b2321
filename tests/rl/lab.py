"""Two tiny models with their two programs, compiled once for all tests of `rl`.

`moe` has everything (experts, an adapter on every linear layer) and serves where numbers must agree
exactly; `toy`, one dense layer with an adapter on one weight, compiles fast, for all the rest.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax import compile as programs
from orbit_jax.adapters.adapter import Adapter, Method, attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.config import OptimizerConfig, PPOConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.rope import Rope
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.rl import objective, rollouts, sampler, step
from orbit_jax.rl.advantages import dr_grpo
from orbit_jax.rl.batch import Batch, Bucket, make_batch
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.rl.sampler import Incoming, SamplerState
from orbit_jax.rl.step import StepConfig
from orbit_jax.rl.train_state import Critic, TrainState, init_state

MOE = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=32,
    rms_norm_eps=1e-6,
    rope=Rope(1e4),
    max_positions=64,
    tie_word_embeddings=True,
    qk_norm="head",
    sparse=(True, True),
    num_experts=4,
    top_k=2,
    expert_size=32,
    norm_topk_prob=True,
)
TOY = dataclasses.replace(MOE, num_layers=1, sparse=(False,), num_experts=0, top_k=0)
ROWS, SLOTS, STOPS = 24, 64, 4
LORA = LoRA(8, 16.0)


class Lab:
    """A tiny model, its programs, and short ways to run them with what most tests want."""

    rows, slots = ROWS, SLOTS

    def __init__(self, model: ModelConfig, targets: Sequence[str], method: Method = LORA):
        # No option may be added to save time: without LLVM's optimisation (level 0) log-probs
        # of sampler and trainer differ.
        self.options = programs.options(model.recipe)
        self.model, self.targets, self.method = model, tuple(targets), method
        self.base = jax.jit(functools.partial(freeze, model))(draw_weights(model))
        self.sample = self.jit(sampler.sample, "config filters", donate_argnames=("state",))
        self.step = self.jit(
            step.ppo_step, "config loss_fn advantage_fn", donate_argnames=("state",)
        )
        self.forward = self.jit(objective.forward, "config")
        self.values = self.jit(objective.values, "config")
        self.words = self.jit(words_and_hidden, "config")

    def jit(self, fn: Callable, static: str = "", **given: Any) -> programs.Program:
        """A program with the options of this model's programs."""
        return programs.jit(fn, self.options, static_argnames=static.split(), **given)

    def adapter(self, seed: int = 1, size: float = 0.1, targets: Sequence[str] = ()) -> Adapter:
        """An adapter that is not zero anywhere; of size 0 a fresh one, LoRA's with B = 0."""
        targets = tuple(targets) or self.targets
        rng = np.random.default_rng(seed)

        def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            noise = rng.standard_normal(leaf.shape, np.float32)
            return jnp.asarray(noise * (0.1 + size if path[-1].key == "a" else size))

        shapes = jax.eval_shape(lambda: attach(self.method, jax.random.key(0), self.base, targets))
        return jax.tree_util.tree_map_with_path(draw, shapes)

    def critic(self) -> Critic:
        return Critic(self.adapter(7, size=0), jnp.zeros(self.model.hidden_size))

    def empty(self, num_rows: int = ROWS) -> SamplerState:
        return sampler.empty_state(self.model, num_rows, SLOTS, STOPS)

    def generate(self, adapter: Adapter | None, num_rows: int = ROWS, **given: Any) -> Rollouts:
        """Rollouts of four samples of each of six prompts, unless told otherwise."""
        asked = {
            "prompts": prompts(),
            "group_size": 4,
            "max_completion_tokens": 40,
            "stop_ids": (0, 9),
            "temperature": 1.0,
            "seed": 0,
            "step": 0,
        } | given
        state = self.empty(num_rows)
        out, _ = rollouts.generate(self.sample, self.model, self.base, adapter, state, **asked)
        return out

    def advance(
        self, adapter: Adapter, state: SamplerState, incoming: Incoming, max_steps: int
    ) -> SamplerState:
        """One call of the sampler; `state` is donated."""
        args = (self.model, self.base, adapter, state, incoming, np.int32(max_steps))
        return self.sample(*args, filters=False)

    def batch(
        self, sampled: Rollouts, rewards: np.ndarray | None = None, micro_batches: int = 1
    ) -> Batch:
        """A batch with random rewards unless some are given, always in the largest bucket."""
        if rewards is None:
            rewards = np.random.default_rng(0).random(len(sampled.lengths))
        bucket = sampled.tokens.size // micro_batches
        return make_batch(self.model, sampled, rewards, micro_batches, (Bucket(bucket, bucket),))

    def config(self, **given: Any) -> StepConfig:
        """Step settings; a field of any of the three records is given by its name alone."""

        def fill(kind: type, **defaults: Any) -> Any:
            names = {f.name for f in dataclasses.fields(kind)}
            return kind(**defaults | {k: given.pop(k) for k in list(given) if k in names})

        ppo = fill(PPOConfig, kl="metric")
        rates = {"learning_rate": 1e-6, "warmup_steps": 0, "max_gradient_norm": 1e9}
        return StepConfig(self.model, ppo, fill(OptimizerConfig, **rates), SLOTS, **given)

    def state(self, config: StepConfig, policy: Adapter, **given: Any) -> TrainState:
        """A fresh state; `critic`, `reference` and `kl_coefficient` by name."""
        return init_state(config.optimizer, policy, **{"critic": None} | given)

    def train(
        self,
        config: StepConfig,
        state: TrainState,
        batch: Batch,
        loss_fn: Any = ppo_clip,
        advantage_fn: Any = dr_grpo,
    ) -> tuple[TrainState, dict[str, np.ndarray]]:
        """One step from a copy of `state`, so that a test may start from it again."""
        state = jax.tree.map(jnp.copy, state)
        return jax.device_get(self.step(config, self.base, state, batch, loss_fn, advantage_fn))

    def logprobs(
        self, adapter: Adapter | None, stream: Stream, temperature: float = 1.0
    ) -> np.ndarray:
        """The trainer's own log-probs [N] of a stream, each standing at the token it is of."""
        config = self.config()
        out = self.forward(config, self.base, adapter, stream, None, np.float32(temperature))
        return np.asarray(out[0])


def draw_weights(model: ModelConfig) -> dict:
    """Random weights, so large that log-probs are far from uniform."""
    shapes = jax.eval_shape(lambda: init_weights(model, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = rng.standard_normal(leaf.shape, np.float32)
        if path[-1].key.endswith("norm"):
            return 1 + 0.1 * noise
        return noise * 1.5 / np.sqrt(leaf.shape[-1], dtype=np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def words_and_hidden(config: ModelConfig, base: dict, adapter: Adapter, stream: Stream) -> tuple:
    """All logits [N, V] and hidden states [N, D], each standing at the token that was read last."""
    hidden, _, _ = apply(config, base, adapter, stream)
    return logits(config, base, hidden), hidden


def prompts(count: int = 6, shortest: int = 10, longest: int = 16, seed: int = 0) -> list:
    """Lists of ids without 0, which is padding and a stop id in these tests."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [rng.integers(1, 64, n).tolist() for n in lengths]
