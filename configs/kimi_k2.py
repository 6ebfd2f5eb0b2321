r"""PPO on Kimi-K2 (1.03T parameters, experts in INT4) on one node of eight devices.

Commands:
  python experiments/plan.py --config configs/kimi_k2.py --device b200 --count 8
  python experiments/ppo_math.py --config configs/kimi_k2.py \
      --config.base.path=/path/to/Kimi-K2-Thinking --config.task.mixture="('data:problems.jsonl',)"
  python experiments/ppo_math.py --config configs/kimi_k2.py:tiny
Variants:
  tiny    the same structure at laptop size, with random weights: two minutes of CPU time
  tiny8   the same on eight simulated devices
Needs: the checkpoint of Kimi-K2-Thinking (594 GB; of K2.5 the language model is read), eight
devices of 180 GB, problems as rows of {"prompt", "answer"}.
Trains: 1,088,734,208 parameters of the policy (0.11%), 1,001,164,800 of them on routed experts, and
87,569,408 of a critic.
Plan on 8 x B200, GB of each device, by the compiler:
  base 74.7, policy 0.5, critic 0.0, moments 1.2, cache 2.9, batch 0.0
  sampler: arguments 78.1, temporaries 1.9, with the rest 81.3 (42.5%)
  step: arguments 76.5, temporaries 6.3, with the rest 85.7 (44.7%)
  largest, others as they are: 190 prompts a step, 73,856 tokens a completion,
  32 rollouts of a micro-batch, rank 1,024
"""

from ml_collections import ConfigDict

from orbit_jax.recipes import in_variant, node


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `orbit_jax/recipes.py`; fields are those of `tiny_moe.py`."""
    config = node("kimi_k2")
    config.ppo.advantage = "gae"  # a critic
    config.ppo.lam = 0.95
    config.ppo.kl = "loss"  # to the base, by one more forward pass without an adapter
    config.ppo.kl_coefficient = 1e-3

    # A pair for each of 384 experts is 10 G at rank 16. With the side of the residual stream shared
    # rank 7 takes no more than ranks of 1 and 2, and learns more: experiments/expert_adapters.py.
    config.adapter.experts = "outer"
    config.adapter.overrides = (
        "experts.gate_proj:7",
        "experts.up_proj:7",
        "experts.down_proj:7",
    )
    config.adapter.critic_targets = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "shared_experts.gate_proj",
        "shared_experts.up_proj",
        "shared_experts.down_proj",
    )
    return in_variant(config, variant)
