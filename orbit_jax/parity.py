"""The gate: log-probs of sampler and trainer must differ by exactly 0, and what to do if not.

At start-up `choose` runs the real sampler and the real step with a random non-zero adapter on
every bucket of the run, and takes the first recipe under which the difference is 0 on this machine.
During the run every batch is checked by the step itself.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax import compile as compiler
from orbit_jax import processes
from orbit_jax.config import Config
from orbit_jax.model.config import ModelConfig
from orbit_jax.rl.advantages import AdvantageFn
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.losses import LossFn
from orbit_jax.rl.rollouts import generate
from orbit_jax.rl.sampler import SamplerState, sample
from orbit_jax.rl.step import StepConfig, ppo_step
from orbit_jax.rl.train_state import TrainState

RECIPES = ("fast", "tiles", "corrected")
_ROUNDS = 4  # of sampling and training that a recipe must pass
_SHARES = (1.0, 0.75, 0.5, 0.5)  # of the completion limit that a row may sample, by turns
_NOISE = 0.05  # standard deviation of the gate's adapter; large, so that no token is certain


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two jitted functions of the loop and the static arguments that go with them."""

    recipe: str
    model: ModelConfig
    step: StepConfig
    sample: compiler.Program
    ppo_step: compiler.Program


@dataclasses.dataclass(frozen=True)
class Report:
    """What the gate saw: per recipe that was tried, the largest difference by bucket of tokens."""

    recipe: str
    gaps: dict[str, dict[int, float]]

    @property
    def sentence(self) -> str:
        """One line for the log."""
        tried = "; ".join(
            f"{recipe}: "
            + ", ".join(f"{gap:g} at {size} tokens" for size, gap in by_bucket.items())
            for recipe, by_bucket in self.gaps.items()
        )
        gate = f"log-prob gate: recipe {self.recipe!r} on {jax.default_backend()} ({tried})"
        if self.recipe != "corrected":
            return gate
        return (
            f"WARNING: no recipe makes log-probs of sampler and trainer equal on this machine; "
            f"training goes on with truncated importance weights. {gate}"
        )


def build(recipe: str, model: ModelConfig, config: Config, platform: str | None = None) -> Programs:
    """Makes the jitted functions of a recipe, by default for the platform in use.

    Nothing is compiled yet.
    """
    numerics = "tiles" if recipe == "tiles" else "fast"
    model = dataclasses.replace(model, recipe=numerics)
    options = compiler.options(numerics, platform)
    return Programs(
        recipe=recipe,
        model=model,
        step=StepConfig(
            model,
            config.ppo,
            config.optimizer,
            config.sampler.max_completion_tokens,
            seed=config.seed,
            exact=recipe != "corrected",
        ),
        sample=compiler.jit(
            sample,
            options,
            static_argnames=("config", "filters"),
            donate_argnames=("state",),
        ),
        ppo_step=compiler.jit(
            ppo_step,
            options,
            static_argnames=("config", "loss_fn", "advantage_fn"),
            donate_argnames=("state",),
        ),
    )


def choose(
    config: Config,
    model: ModelConfig,
    base: dict,
    state: TrainState,
    slots: SamplerState,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    loss_fn: LossFn,
    advantage_fn: AdvantageFn,
) -> tuple[Programs, SamplerState, Report]:
    """The programs of the first recipe with difference 0 on every bucket.

    Args:
      config: `config.parity` is a recipe, or `auto` for the first that passes: `fast` (not on a
        GPU, where nobody has seen it give 0 yet), `tiles`, `corrected`.
      state: only its shapes and placement matter; the gate perturbs a copy.
      slots: the sampler's state; donated, go on with the one that is returned.
      prompts: real ones, repeated as needed to fill the slots.

    Raises:
      ValueError: if the recipe that the config asks for does not pass.
    """
    if config.parity == "auto":
        recipes = RECIPES if jax.default_backend() == "cpu" else RECIPES[1:]
    else:
        recipes = (config.parity,)
    gaps: dict[str, dict[int, float]] = {}
    for recipe in recipes:
        programs = build(recipe, model, config)
        gaps[recipe], slots = measure(
            programs,
            config,
            base,
            state,
            slots,
            prompts,
            stop_ids,
            loss_fn,
            advantage_fn,
        )
        if not all(np.isfinite(list(gaps[recipe].values()))):
            raise ValueError(
                "log-probs are not finite: check the weights of base.path and adapter.alpha"
            )
        if recipe == "corrected" or not any(gaps[recipe].values()):
            return programs, slots, Report(recipe, gaps)
    raise ValueError(
        f"config.parity={config.parity!r}: log-probs of sampler and trainer differ by up to "
        f"{max(gaps[config.parity].values()):g} on this machine; set parity to 'auto'"
    )


def measure(
    programs: Programs,
    config: Config,
    base: dict,
    state: TrainState,
    slots: SamplerState,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    loss_fn: LossFn,
    advantage_fn: AdvantageFn,
) -> tuple[dict[int, float], SamplerState]:
    """The largest difference on each bucket, and the slots."""
    model, width = programs.model, config.num_slots
    groups = config.sampler.prompts_per_step
    prompts = [prompts[i % len(prompts)] for i in range(groups)]
    gaps: dict[int, float] = {}
    buckets, limit = token_buckets(config), config.sampler.max_completion_tokens
    # A difference may show in one token of a thousand: few buckets are gone through repeatedly.
    for i, bucket in enumerate(
        itertools.islice(itertools.cycle(buckets), max(len(buckets), _ROUNDS))
    ):
        # A limit per row keeps the rollouts of this round within the bucket.
        size = bucket.tokens
        per_row = min(size * config.ppo.micro_batches // config.rows, width)
        cut = [prompt[: max(per_row // 2, 1)] for prompt in prompts]
        longest = min(per_row - max(map(len, cut)), limit)
        # Rows end at different times, so that decoding goes through all its numbers of rows.
        limits = [max(1, int(longest * _SHARES[row % len(_SHARES)])) for row in range(config.rows)]
        noisy = perturbed(state, i)
        rollouts, slots = generate(
            programs.sample,
            model,
            base,
            noisy.policy,
            slots,
            cut,
            group_size=config.sampler.group_size,
            max_completion_tokens=limits,
            stop_ids=stop_ids,
            temperature=config.sampler.temperature,
            seed=config.seed,
            step=i,
        )
        rewards = np.arange(config.rows) % 2
        batch = make_batch(model, rollouts, rewards, config.ppo.micro_batches, (bucket,))
        _, metrics = programs.ppo_step(programs.step, base, noisy, batch, loss_fn, advantage_fn)
        gap = float(metrics["parity/max_abs_diff"])
        gaps[size] = gap if np.isnan(gap) else max(gaps.get(size, 0.0), gap)
    return gaps, slots


def perturbed(state: TrainState, seed: int) -> TrainState:
    """A copy with noise on the policy's parameters, large enough that each adapter term matters."""
    copy = jax.tree.map(jnp.copy, state)
    leaves, structure = jax.tree.flatten(copy.policy.params)
    # Drawn on the host: there is no program to compile for each shape.
    normal = np.random.default_rng(seed).standard_normal
    noisy = [
        processes.put(processes.read(p) + _NOISE * normal(p.shape, np.float32), p.sharding)
        for p in leaves
    ]
    params = jax.tree.unflatten(structure, noisy)
    return copy.replace(policy=copy.policy.replace(params=params))
