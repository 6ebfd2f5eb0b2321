"""What must hold of a configuration: ranges, choices, and fields that belong together."""

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orbit_jax import adapter_config, alerts_config, ppo_config
from orbit_jax.checkpoint.own import make_known
from orbit_jax.own_code import is_own, load_own

if TYPE_CHECKING:
    from orbit_jax.config import Config

OWN_CODE = ("ppo.loss", "ppo.advantage", "adapter.method")  # may name code of one's own


def require_valid(config: "Config") -> None:
    """Holds the fields to their ranges and choices, and to each other.

    Raises:
      ValueError: with the field, its value and the remedy.
    """

    def value_of(field: str) -> Any:
        return functools.reduce(getattr, field.split("."), config)

    def require(ok: bool, field: str, remedy: str) -> None:
        if not ok:
            raise ValueError(f"config.{field}={value_of(field)!r}: {remedy}")

    positive = """
        steps adapter.rank sampler.prompts_per_step sampler.group_size sampler.max_prompt_tokens
        sampler.max_completion_tokens mesh.data mesh.tensor mesh.processes evaluation.every_steps
        evaluation.problems task.train_problems
        task.heldout_problems run.checkpoint_every_steps run.keep_checkpoints
        run.samples_every_steps optimizer.learning_rate optimizer.critic_learning_rate
        optimizer.max_gradient_norm adapter.alpha
        task.grader_workers task.grader_max_seconds task.max_grading_seconds tools.max_turns
        tools.max_seconds tools.workers tools.program_seconds tools.sandbox_workers
        base.working_copy_share
    """
    not_negative = """
        seed task.data_seed task.unseen_problems optimizer.warmup_steps optimizer.weight_decay
        optimizer.b1 optimizer.b2 sampler.slots reward.length_buffer reward.length_weight
    """
    for field in (positive + ppo_config.POSITIVE + alerts_config.POSITIVE).split():
        require(value_of(field) > 0, field, "must be above 0")
    for field in (not_negative + ppo_config.NOT_NEGATIVE + alerts_config.NOT_NEGATIVE).split():
        require(value_of(field) >= 0, field, "must be at least 0")
    most = {
        "seed": 2**32 - 1,  # it keys the noise as 32 bits
        "task.grader_max_seconds": 3600,
        "reward.length_buffer": config.sampler.max_completion_tokens,
        "sampler.temperature": 100,
        "ppo.gamma": 1,
        "ppo.lam": 1,
        "optimizer.b1": 0.9999999,
        "optimizer.b2": 0.9999999,
        "optimizer.learning_rate": 1,
        "optimizer.critic_learning_rate": 1,
    }
    for field, limit in most.items():
        require(value_of(field) <= limit, field, f"must be at most {limit}")
    choices = {
        **adapter_config.CHOICES,
        "base.weights": ("checkpoint", "random"),
        "base.working_copy": ("auto", "never", "always"),
        "tools.isolation": ("strict", "weak"),
        "parity": ("auto", "fast", "tiles", "corrected"),
        **ppo_config.CHOICES,
    }
    for field, allowed in choices.items():
        remedy = f"use one of {allowed}"
        if field in OWN_CODE:
            remedy += ", or a function of your own as 'my_file.py:name'"
            if is_own(value_of(field)):
                _with_field(load_own, field, value_of(field))
                continue
        require(value_of(field) in allowed, field, remedy)
    for name in config.base.own:  # from here on loaders find them by their names
        require(is_own(name), "base.own", "name each as 'my_file.py:name'")
        _with_field(make_known, "base.own", name)
    for ok, field, remedy in (
        *adapter_config.requirements(config.adapter),
        *ppo_config.requirements(config),
        *alerts_config.requirements(config.alerts),
    ):
        require(ok, field, remedy)
    require(
        config.ppo.critic or not config.adapter.critic_targets,
        "adapter.critic_targets",
        f"there is no critic with ppo.advantage={config.ppo.advantage!r}: leave it empty, or use "
        "'gae'",
    )
    require(
        re.fullmatch(r"[^/\\#?%:]{0,128}", config.run.wandb) is not None,
        "run.wandb",
        r"must be the name of a project, without any of /\#?%:, or empty",
    )
    require(
        config.sampler.temperature >= 0.01,
        "sampler.temperature",
        "training on greedy samples is refused: they have no log-prob that an update could move; "
        "use a temperature of at least 0.01",
    )
    require(
        "python" not in config.tools.use or config.tools.workers <= config.tools.sandbox_workers,
        "tools.workers",
        f"with python in tools.use, calls would wait for one of the {config.tools.sandbox_workers} "
        "programs that the sandbox runs at the same time, and be late: set it to at most "
        "tools.sandbox_workers, or raise that to the cores there are",
    )
    require(
        config.mesh.size % config.mesh.processes == 0,
        "mesh.processes",
        f"must divide the {config.mesh.size} devices of the mesh",
    )
    require(
        -1 <= config.mesh.process < config.mesh.processes,
        "mesh.process",
        f"must be a number from 0 to {config.mesh.processes - 1}, or -1 where a cluster tells",
    )
    require(
        re.fullmatch(r"(.+:\d+)?", config.mesh.coordinator) is not None,
        "mesh.coordinator",
        "must be host:port of process 0, or empty where a cluster tells",
    )
    require(
        config.decoded_rows <= config.rows and config.decoded_rows % config.mesh.size == 0,
        "sampler.slots",
        f"must be at most the {config.rows} rollouts of a step and a multiple of the "
        f"{config.mesh.size} devices of the mesh; 0 is one for each rollout",
    )


def _with_field(use: Callable[[str], Any], field: str, name: str) -> None:
    try:
        use(name)
    except ValueError as error:
        raise ValueError(f"config.{field}={name!r}: {error}") from error
