"""How far each setting could go before a run no longer fits, all others as they are."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orbit_jax.config import Config
from orbit_jax.model.config import ModelConfig
from orbit_jax.plan.estimate import estimate
from orbit_jax.plan.plan import Plan

_MOST_PROMPTS, _HIGHEST_RANK = 4096, 1024  # no search goes beyond


@dataclass(frozen=True)
class Setting:
    """What memory depends on. `best` is the largest value that fits, 0 where none does."""

    name: str
    now: int
    best: int


def largest(
    plan: Plan, model: ModelConfig, trained: Callable[[Config], int]
) -> tuple[Setting, ...]:
    """The largest feasible value of each setting, by the closed form.

    What it misses of the compiled programs is taken to stay as it is at the config of the plan.

    Args:
      trained: the trained parameters, policy and critic together, of a config.
    """
    config = plan.config
    sampler, ppo, now = config.sampler, config.ppo, trained(config)
    missed = plan.needed - plan.guess.total

    def fits(changed: Config) -> bool:
        size = now if changed.adapter == config.adapter else trained(changed)
        guess = estimate(changed, model, plan.parts["base"], size)
        return guess.total + missed <= plan.room

    def prompts(value: int) -> Config:
        """With as many micro-batches more, so that each stays as large as it is."""
        micro = -(-ppo.micro_batches * value // sampler.prompts_per_step)
        return dataclasses.replace(
            config,
            sampler=dataclasses.replace(sampler, prompts_per_step=value, slots=0),
            ppo=dataclasses.replace(ppo, micro_batches=micro),
        )

    def completion(value: int) -> Config:
        changed = dataclasses.replace(sampler, max_completion_tokens=value)
        return dataclasses.replace(config, sampler=changed)

    def micro_batch(rows: int) -> Config:
        changed = dataclasses.replace(ppo, micro_batches=config.rows // rows)
        return dataclasses.replace(config, ppo=changed)

    def rank(value: int) -> Config:
        return dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, rank=value))

    unit = max(1, config.mesh.size // sampler.group_size)
    longest = model.max_positions - sampler.max_prompt_tokens
    divisors = [
        n for n in range(1, config.rows + 1) if not config.rows % n and not n % config.mesh.data
    ]
    searches: tuple[tuple[str, int, Callable[[int], Config], Sequence[int]], ...] = (
        (
            "sampler.prompts_per_step",
            sampler.prompts_per_step,
            prompts,
            range(unit, _MOST_PROMPTS + 1, unit),
        ),
        (
            "sampler.max_completion_tokens",
            sampler.max_completion_tokens,
            completion,
            range(64, longest + 1, 64),
        ),
        ("rollouts of a micro-batch", config.rows // ppo.micro_batches, micro_batch, divisors),
    )
    if config.adapter.method == "lora":  # block sizes must divide widths, and are chosen by them
        ranks = range(1, _HIGHEST_RANK + 1)
        searches += (("adapter.rank", config.adapter.rank, rank, ranks),)

    def best(change: Callable[[int], Config], values: Sequence[int]) -> int:
        first_that_does_not = bisect.bisect_left(
            values, True, key=lambda value: not fits(change(value))
        )
        return values[first_that_does_not - 1] if first_that_does_not else 0

    return tuple(
        Setting(name, value, best(change, values)) for name, value, change, values in searches
    )
