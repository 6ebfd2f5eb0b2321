"""This project as a contestant; `worker.py` says what is spoken.

Settings of its own: `working_copy` (never), `micro_batches` (4), `slots` of the varied cases (as
many as rollouts; fewer are refilled when a row ends), `compilation_cache` (a folder; empty).
"""

import jax
import numpy as np
from worker import CASES, counted, lengths_of, serve

from orbit_jax import mesh, parity, startup
from orbit_jax.config import Config, from_config_dict
from orbit_jax.rl import sampler
from orbit_jax.rl.advantages import grpo
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import Rollouts, generate

TOKEN_BUCKETS = (0.6, 0.75, 1.0)  # shares of a full micro-batch


class Contestant:
    """The sampler and the step on one base; slots are made for the case at hand and kept for it."""

    def __init__(self, settings: dict):
        self.settings, self.step = settings, 0
        if folder := settings.get("compilation_cache", ""):
            jax.config.update("jax_compilation_cache_dir", folder)
        self.configs = {case: config_of(settings, case) for case in CASES}
        longest = self.configs["step_varied"]
        startup.set_up_jax(longest)
        self.frozen = startup.load(longest)
        self.state = startup.train_state(longest, self.frozen)
        self.programs = parity.build("fast", self.frozen.model, longest)
        self.slots, self.slots_are_for = None, ""

    def facts(self) -> dict:
        """For the report."""
        return startup.facts(self.frozen, self.state) | {"jax": jax.__version__}

    def run(self, case: str) -> dict:
        """One case, once."""
        rollouts = self.sample(case)
        tokens = counted(self.settings, case, rollouts.completion_lengths.tolist())
        if case.startswith("sample"):
            return {"tokens": tokens}
        return {"tokens": tokens} | self.train(case, rollouts)

    def sample(self, case: str) -> Rollouts:
        """All rollouts of a case."""
        model, settings = self.programs.model, self.settings
        lengths, varied = lengths_of(settings, case), case.endswith("varied")
        if self.slots_are_for != case:
            self.slots = None  # those of the other case go first
            count = settings.get("slots", len(lengths)) if varied else len(lengths)
            slots = sampler.empty_state(model, count, self.configs[case].num_slots, 1)
            self.slots = mesh.place(model, slots, sampler.state_specs(model, slots))
            self.slots_are_for = case
        self.step += 1
        rollouts, self.slots = generate(
            self.programs.sample,
            model,
            self.frozen.base,
            self.state.policy,
            self.slots,
            settings["prompt_ids"],
            group_size=settings["group_size"],
            max_completion_tokens=lengths if varied else lengths[0],
            stop_ids=(),
            temperature=1.0,
            seed=settings["seed"],
            step=self.step,
        )
        return rollouts

    def train(self, case: str, rollouts: Rollouts) -> dict:
        """A PPO step on them."""
        config = self.configs[case]
        rewards = np.arange(len(rollouts.lengths)) % 2
        batch = make_batch(
            self.programs.model, rollouts, rewards, config.ppo.micro_batches, token_buckets(config)
        )
        self.state, metrics = self.programs.ppo_step(
            self.programs.step, self.frozen.base, self.state, batch, ppo_clip, grpo
        )
        return {"logprob_gap": float(jax.device_get(metrics)["parity/max_abs_diff"])}


def config_of(settings: dict, case: str) -> Config:
    """The run's configuration that a case amounts to."""
    return from_config_dict(
        {
            "seed": settings["seed"],
            "base": {
                "path": settings["base"],
                "working_copy": settings.get("working_copy", "never"),
            },
            "adapter": {"rank": settings["rank"], "alpha": float(settings["alpha"])},
            "sampler": {
                "prompts_per_step": len(settings["prompts"]),
                "group_size": settings["group_size"],
                "max_prompt_tokens": max(map(len, settings["prompt_ids"])),
                "max_completion_tokens": max(lengths_of(settings, case)),
            },
            "ppo": {
                "micro_batches": settings.get("micro_batches", 4),
                "token_buckets": TOKEN_BUCKETS,
            },
            "run": {"compilation_cache": False},
        }
    )


def load(settings: dict) -> tuple[dict, dict]:
    """The cases of this project."""
    contestant = Contestant(settings)
    return {case: lambda case=case: contestant.run(case) for case in CASES}, contestant.facts()


if __name__ == "__main__":
    serve(load)
