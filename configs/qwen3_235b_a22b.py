r"""PPO on Qwen3-235B-A22B (235B parameters, FP8 in blocks) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/qwen3_235b_a22b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/qwen3_235b_a22b.py \
      --config.base.path=/path/to/Qwen3-235B-A22B-FP8 \
      --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/qwen3_235b_a22b.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: a minute of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of Qwen/Qwen3-235B-A22B-FP8 (236 GB), problems as rows of
{"prompt", "answer"}.
Trains: 3,303,505,920 parameters (1.4%), 3,252,682,752 of them on experts.
Plan on 8 x B200, GB of each device, by the compiler:
  base 30.7, policy 1.7, moments 3.3, cache 7.9
  sampler: arguments 40.3, temporaries 1.9, with the rest 45.4 (23.7%)
  step: arguments 35.7, temporaries 6.4, with the rest 49.9 (26.1%)
  largest, others as they are: 137 prompts a step, 39,936 tokens a completion,
  64 rollouts of a micro-batch, rank 226
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("qwen3_235b_a22b")
    config.mesh.data, config.mesh.tensor = 2, 4
    return in_variant(config, variant)
