r"""PPO on gpt-oss-120b (117B parameters, experts in MXFP4) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/gpt_oss_120b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/gpt_oss_120b.py \
      --config.base.path=/path/to/gpt-oss-120b --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/gpt_oss_120b.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: a minute of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of openai/gpt-oss-120b (65 GB), problems as rows of {"prompt", "answer"}.
Trains: 1,285,963,776 parameters (1.1%), 1,274,019,840 of them on experts.
Plan on 8 x B200, GB of each device, by the compiler:
  base 8.7, policy 0.6, moments 1.3, cache 3.0
  sampler: arguments 12.4, temporaries 0.8, with the rest 14.5 (7.6%)
  step: arguments 10.6, temporaries 2.7, with the rest 16.4 (8.5%)
  largest, others as they are: 418 prompts a step, 130,048 tokens a completion,
  64 rollouts of a micro-batch, rank 694
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("gpt_oss_120b")
    config.mesh.data, config.mesh.tensor = 2, 4
    return in_variant(config, variant)
