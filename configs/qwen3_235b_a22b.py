r"""PPO on Qwen3-235B-A22B (235B parameters, FP8 in blocks) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/qwen3_235b_a22b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/qwen3_235b_a22b.py \
      --config.base.path=/path/to/Qwen3-235B-A22B-FP8 --config.task.jsonl=problems.jsonl
  python experiments/ppo_math.py --config configs/qwen3_235b_a22b.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: a minute of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of Qwen/Qwen3-235B-A22B-FP8 (236 GB), problems as rows of
{"prompt", "answer"}.
Trains: 3,303,505,920 parameters (1.4%), 3,252,682,752 of them on experts.
Plan: `make plan` with this config; not recorded yet.
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("qwen3_235b_a22b")
    config.mesh.data, config.mesh.tensor = 2, 4
    return in_variant(config, variant)
