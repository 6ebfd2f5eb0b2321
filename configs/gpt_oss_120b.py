r"""PPO on gpt-oss-120b (117B parameters, experts in MXFP4) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/gpt_oss_120b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/gpt_oss_120b.py \
      --config.base.path=/path/to/gpt-oss-120b --config.task.jsonl=problems.jsonl
  python experiments/ppo_math.py --config configs/gpt_oss_120b.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: a minute of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of openai/gpt-oss-120b (65 GB), problems as rows of {"prompt", "answer"}.
Trains: 1,285,963,776 parameters (1.1%), 1,274,019,840 of them on experts.
Plan: to be filled in from `experiments/plan.py`.
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("gpt_oss_120b")
    config.mesh.data, config.mesh.tensor = 2, 4
    return in_variant(config, variant)
