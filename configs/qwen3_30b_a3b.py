r"""PPO on Qwen3-30B-A3B (30.5B parameters, FP8 in blocks) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/qwen3_30b_a3b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/qwen3_30b_a3b.py \
      --config.base.path=/path/to/Qwen3-30B-A3B-FP8 --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/qwen3_30b_a3b.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: a minute of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of Qwen/Qwen3-30B-A3B-FP8 (31 GB), problems as rows of
{"prompt", "answer"}.
Trains: 843,841,536 parameters (2.8%), 830,472,192 of them on experts.
Plan on 8 x B200, GB of each device, by the compiler:
  base 4.2, policy 0.4, moments 0.8, cache 4.0
  sampler: arguments 8.6, temporaries 0.7, with the rest 10.2 (5.3%)
  step: arguments 5.4, temporaries 1.8, with the rest 11.3 (5.9%)
  largest, others as they are: 324 prompts a step, 39,936 tokens a completion,
  64 rollouts of a micro-batch, rank 1,024
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("qwen3_30b_a3b")
    config.mesh.data, config.mesh.tensor = 2, 4
    return in_variant(config, variant)
