r"""PPO on a mixture of 1.6T parameters, experts in FP4, on one node of eight devices.

The widths, the 384 experts (6 a token) and the formats are those of DeepSeek-V4-Pro: experts in
MXFP4, the rest in FP8 by blocks under powers of two. Its attention is not supported; Kimi-K2's
multi-head latent attention stands in for it, and a sigmoid router for its own. So there is no
checkpoint that this recipe loads: it shows what a node holds, planned or with random weights.

Commands:
  python experiments/plan.py --config configs/moe_1600b.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/moe_1600b.py \
      --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/moe_1600b.py:tiny
Variants:
  tiny    the same structure at laptop size: a minute and a half of CPU time
  tiny8   the same on eight simulated devices
Needs: eight devices of 180 GB for 836 GB of random weights.
Trains: 494,980,352 parameters (0.032%), 479,723,520 of them on routed experts.
Plan on 8 x B200, GB of each device, by the compiler:
  base 104.8, policy 0.2, moments 0.5, cache 2.9, batch 0.0
  sampler: arguments 107.9, temporaries 1.5, with the rest 109.9 (57.4%)
  step: arguments 105.5, temporaries 4.4, with the rest 112.7 (58.9%)
  largest, others as they are: 138 prompts a step, 53,824 tokens a completion,
  32 rollouts of a micro-batch, rank 1,024
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("moe_1600b")
    config.base.weights = "random"
    # A pair of rank 1 on one matrix of each of 384 experts in 61 layers is 240 M parameters: two
    # of the three matrices, and little elsewhere, are the fewest bytes that reach 0.03%.
    config.adapter.rank, config.adapter.alpha = 4, 8.0
    config.adapter.targets = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "experts.up_proj",
        "experts.down_proj",
    )
    config.adapter.overrides = ("experts.up_proj:1", "experts.down_proj:1")
    return in_variant(config, variant)
