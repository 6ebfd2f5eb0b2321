"""On a GPU: log-prob gap of both exact recipes, tokens per second, memory. Skips without a device.

    python experiments/gpu_check.py

Writes `runs/gpu_check.json`. The shipped tiny base is enough to see whether sampler and trainer
agree bit for bit on a platform; it is too small to say anything about speed at scale.
"""

import json
import time
from pathlib import Path

import jax
import numpy as np
from absl import app

from orbit_jax import parity, startup
from orbit_jax.config import Config, PPOConfig
from orbit_jax.rl.advantages import grpo
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import generate

STEPS = 3


def check(config: Config, recipe: str) -> dict:
    """Gap by bucket and speed of one recipe."""
    frozen = startup.load(config)
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 16).tolist() for _ in range(config.sampler.prompts_per_step)]
    programs = parity.build(recipe, frozen.model, config)
    stop_ids = frozen.tokenizer.eos_ids
    gaps, slots = parity.measure(
        programs, config, frozen.base, state, slots, prompts, stop_ids, ppo_clip, grpo
    )
    rates = {"sampled_tokens_per_second": 0.0, "trained_tokens_per_second": 0.0}
    for step in range(STEPS + 1):
        began = time.monotonic()
        rollouts, slots = generate(
            programs.sample,
            programs.model,
            frozen.base,
            state.policy,
            slots,
            prompts,
            group_size=config.sampler.group_size,
            max_completion_tokens=config.sampler.max_completion_tokens,
            stop_ids=stop_ids,
            temperature=1.0,
            seed=0,
            step=step,
        )
        sampled = time.monotonic()
        rewards = np.arange(config.rows) % 2
        batch = make_batch(
            programs.model, rollouts, rewards, config.ppo.micro_batches, token_buckets(config)
        )
        state, metrics = programs.ppo_step(programs.step, frozen.base, state, batch, ppo_clip, grpo)
        jax.block_until_ready(metrics)
        if step:  # the first may compile
            new = (
                int(rollouts.sampled.sum()) / (sampled - began),
                int(rollouts.lengths.sum()) / (time.monotonic() - sampled),
            )
            rates = {k: max(v, n) for (k, v), n in zip(rates.items(), new, strict=True)}
    return {"gaps": gaps, **rates}


def main(_: list[str]) -> None:
    if jax.default_backend() == "cpu":
        print("gpu-check: no GPU answers here; skipped")
        return
    config = Config(ppo=PPOConfig(micro_batches=4))
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for recipe in ("fast", "tiles"):
        report[recipe] = check(config, recipe)
        print(recipe, json.dumps(report[recipe], indent=2))
    report["peak_memory_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    path = Path("runs/gpu_check.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    app.run(main)
