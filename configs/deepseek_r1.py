r"""PPO on DeepSeek-R1 (671B parameters, FP8 in blocks) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/deepseek_r1.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/deepseek_r1.py \
      --config.base.path=/path/to/DeepSeek-R1 --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/deepseek_r1.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: two minutes of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of deepseek-ai/DeepSeek-R1 (673 GB without the layer that guesses further
tokens, which is not read), eight devices of 180 GB, problems as rows of {"prompt", "answer"}.
Trains: 1,768,420,352 parameters (0.26%), 1,642,070,016 of them on routed experts.
Plan on 8 x B200, GB of each device, by the compiler:
  base 84.4, policy 0.9, moments 1.8, cache 2.9, batch 0.0
  sampler: arguments 88.1, temporaries 2.1, with the rest 92.0 (48.0%)
  step: arguments 87.0, temporaries 8.0, with the rest 97.9 (51.1%)
  largest, others as they are: 134 prompts a step, 53,952 tokens a completion,
  32 rollouts of a micro-batch, rank 1,024
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("deepseek_r1")
    config.adapter.overrides = (  # of 256 experts; rank 16 there is 6.6 G, 130 GB with its moments
        "experts.gate_proj:4",
        "experts.up_proj:4",
        "experts.down_proj:4",
    )
    return in_variant(config, variant)
