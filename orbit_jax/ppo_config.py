"""The section `ppo` of the configuration: the objective, and what must hold of its fields."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orbit_jax.own_code import is_own

if TYPE_CHECKING:
    from orbit_jax.config import Config

CHOICES = {
    "ppo.loss": ("ppo_clip", "gspo", "cispo", "policy_gradient"),
    "ppo.aggregation": ("token_mean", "sequence_mean", "constant_length"),
    "ppo.advantage": (
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp_baseline",
        "reinforce_pp",
        "reinforce",
        "gae",
    ),
    "ppo.remat": ("auto", "never", "always"),
    "ppo.kl": ("off", "metric", "reward", "loss"),
    "ppo.kl_estimator": ("k1", "k2", "k3"),
    "ppo.correction": ("token_tis", "sequence_tis", "token_mask", "sequence_mask"),
}
POSITIVE = """
    ppo.epochs ppo.minibatches ppo.micro_batches ppo.std_floor
"""
NOT_NEGATIVE = """
    ppo.clip_low ppo.clip_high ppo.value_clip ppo.kl_coefficient ppo.kl_target ppo.max_kl
    ppo.entropy_coefficient ppo.value_coefficient ppo.gamma ppo.lam ppo.dynamic_sampling
"""
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # compare a prompt's rows


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """The objective, and how a batch is turned into updates."""

    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    advantage: str = "grpo"
    dynamic_sampling: int = 0
    overlong_filter: bool = False
    epochs: int = 1
    minibatches: int = 1
    max_kl: float = 0.0
    micro_batches: int = 2
    token_buckets: tuple[float, ...] = (0.7, 1.0)
    remat: str = "auto"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    std_floor: float = 1e-4
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    bootstrap_truncated: bool = False
    value_coefficient: float = 0.5
    value_clip: float = 0.0
    entropy_coefficient: float = 0.0
    kl: str = "off"
    kl_estimator: str = "k1"
    kl_coefficient: float = 0.0
    kl_target: float = 0.0
    kl_horizon: float = 10.0
    correction: str = "token_tis"
    max_importance_weight: float = 2.0

    @property
    def critic(self) -> bool:
        """Whether a critic is trained: only GAE reads one."""
        return self.advantage == "gae"

    @property
    def updates(self) -> int:
        """How many the optimiser makes of one batch."""
        return self.epochs * self.minibatches


def requirements(config: "Config") -> Iterator[tuple[bool, str, str]]:
    """What must hold of the section, by itself and beside the others.

    Yields:
      Whether it does, the field that is to blame, and the remedy.
    """
    ppo, sampler = config.ppo, config.sampler
    yield (
        ppo.micro_batches % ppo.minibatches == 0,
        "ppo.minibatches",
        f"must divide ppo.micro_batches={ppo.micro_batches}",
    )
    yield (
        config.rows % (ppo.micro_batches * config.mesh.data) == 0,
        "ppo.micro_batches",
        f"times mesh.data={config.mesh.data} must divide the {config.rows} rollouts of a step "
        "(sampler.prompts_per_step x sampler.group_size)",
    )
    # Of a full micro-batch, whose prompts are held once a group.
    tokens_per_row = sampler.max_prompt_tokens / sampler.group_size + sampler.max_completion_tokens
    yield (
        ppo.token_buckets[-1:] == (1.0,)
        and all(share * tokens_per_row >= 2 for share in ppo.token_buckets)
        and max(ppo.token_buckets) == 1,
        "ppo.token_buckets",
        "must be shares of at least 2 tokens a row; the last is 1.0, which holds any batch",
    )
    yield (
        ppo.advantage not in _WITHIN_GROUPS or sampler.group_size > 1,
        "sampler.group_size",
        f"ppo.advantage={ppo.advantage!r} compares the samples of a prompt and needs at least 2: "
        "raise it, or use 'reinforce', 'reinforce_pp' or 'gae'",
    )
    yield (
        ppo.critic or config.rows > 1,
        "sampler.prompts_per_step",
        f"ppo.advantage={ppo.advantage!r} compares the rollouts of a step and needs at least 2: "
        "raise it or sampler.group_size",
    )
    yield (
        ppo.dynamic_sampling == 0 or ppo.advantage in _WITHIN_GROUPS or is_own(ppo.advantage),
        "ppo.dynamic_sampling",
        f"replaces groups that ppo.advantage={ppo.advantage!r} does not read: set it to 0, or use "
        f"one of {_WITHIN_GROUPS}",
    )
    for field in ("value_clip", "bootstrap_truncated"):
        yield (
            ppo.critic or not getattr(ppo, field),
            f"ppo.{field}",
            f"there is no critic with ppo.advantage={ppo.advantage!r}: leave it out, or use 'gae'",
        )
    yield (
        ppo.dual_clip == 0 or ppo.dual_clip > 1,
        "ppo.dual_clip",
        "must be above 1, or 0 for none",
    )
    yield (
        ppo.dual_clip == 0 or ppo.loss == "ppo_clip",
        "ppo.dual_clip",
        f"is no part of ppo.loss={ppo.loss!r}: set it to 0, or use 'ppo_clip'",
    )
    yield (
        (ppo.kl_coefficient > 0) == (ppo.kl in ("reward", "loss")),
        "ppo.kl_coefficient",
        f"does not go with ppo.kl={ppo.kl!r}: a coefficient above 0 is used by 'reward' and "
        "'loss', which need one",
    )
    yield (
        ppo.kl_target == 0 or ppo.kl in ("reward", "loss"),
        "ppo.kl_target",
        f"there is no coefficient to adapt with ppo.kl={ppo.kl!r}: set it to 0, or ppo.kl to "
        "'reward' or 'loss'",
    )
    yield (
        ppo.kl_horizon >= 1,
        "ppo.kl_horizon",
        "must be at least 1 step; 10 is usual",
    )
    yield (
        ppo.max_kl == 0 or ppo.updates > 1,
        "ppo.max_kl",
        "stops the later of several updates, and a batch makes one: set it to 0, or raise "
        "ppo.epochs or ppo.minibatches",
    )
    yield (
        ppo.max_importance_weight >= 1,
        "ppo.max_importance_weight",
        "must be at least 1, the weight where sampler and trainer agree",
    )
