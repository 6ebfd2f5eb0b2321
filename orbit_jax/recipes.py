"""What the recipes of large models in `configs/` share."""

from ml_collections import ConfigDict

from orbit_jax.config import Config, to_dict

_VARIANTS = ("", "tiny", "tiny8")


def node(model: str) -> ConfigDict:
    """One step of 64 long rollouts on a node of eight devices; every field may be changed.

    Args:
      model: the folder in `configs/models` that has its `config.json`.
    """
    config = ConfigDict(to_dict(Config()))
    config.experiment = model
    config.steps = 100
    config.base.path = f"configs/models/{model}"  # where the checkpoint goes, or is named instead
    config.base.working_copy = "never"
    config.mesh.data, config.mesh.tensor = 1, 8

    config.sampler.prompts_per_step = 8
    config.sampler.max_prompt_tokens = 1024
    config.sampler.max_completion_tokens = 4096
    config.ppo.micro_batches = 32  # of two rows
    config.ppo.remat = "always"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.critic_learning_rate = 4e-4

    config.task.heldout_problems, config.task.unseen_problems = 128, 0
    config.run.checkpoint_every_steps = 10
    return config


def in_variant(config: ConfigDict, variant: str) -> ConfigDict:
    """The recipe as it is, or its rehearsal on a laptop.

    `tiny` has the model of `<base.path>_tiny`, of the same structure at small widths, with random
    weights, and takes two small steps; `tiny8` is the same on eight simulated devices.

    Raises:
      ValueError: for another variant.
    """
    if variant not in _VARIANTS:
        raise ValueError(f"{config.experiment} has no variant {variant!r}: use tiny or tiny8")
    if not variant:
        return config
    small = Config()
    config.base.path += "_tiny"
    config.base.weights = "random"
    config.mesh.data, config.mesh.tensor = (2, 4) if variant == "tiny8" else (1, 1)
    config.mesh.simulate = variant == "tiny8"

    config.steps = 2
    config.sampler.group_size = 4
    config.sampler.max_prompt_tokens = small.sampler.max_prompt_tokens
    config.sampler.max_completion_tokens = small.sampler.max_completion_tokens
    config.ppo.micro_batches = 2
    config.ppo.token_buckets = (1.0,)
    config.evaluation.every_steps = 1
    # No more problems than a step has prompts: evaluation needs no program of its own.
    config.task.train_problems, config.task.heldout_problems = 64, 8
    config.evaluation.problems = 8
    return config
