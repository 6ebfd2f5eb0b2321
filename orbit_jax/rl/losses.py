"""The policy's losses, in the papers' symbols: r or s a ratio, A an advantage, pi the policy.

A loss takes the tokens of a micro-batch and returns the loss of each; the step masks and weighs
them over the whole optimiser batch (`aggregation`), so that no mean of means can arise.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax.config import PPOConfig
from orbit_jax.own_code import load_own
from orbit_jax.rl.rows import row_sums, to_tokens

MAX_LOG_RATIO = 20.0  # exp stays finite, and no ratio that matters is that large


@struct.dataclass
class Tokens:
    """A micro-batch's stream of N tokens: R rows, each in one piece, and padding.

    Attributes:
      logprobs: [N] f32, log pi of each token; what is differentiated.
      old_logprobs: [N] f32, those of the policy that the batch began with.
      advantages: [N] f32.
      mask: [N] bool, the tokens that were sampled; all else is 0 outside it.
      rows: [N] int32 in [0, R]; R is padding.
      num_rows: R, static.
    """

    logprobs: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    mask: jax.Array
    rows: jax.Array
    num_rows: int = struct.field(pytree_node=False)

    def row_sum(self, values: jax.Array) -> jax.Array:
        """[N] to [N]: at each token, the sum over its row's tokens under the mask."""
        masked = jnp.where(self.mask, values, 0.0)
        return to_tokens(row_sums(masked, self.rows, self.num_rows), self.rows)

    def row_mean(self, values: jax.Array) -> jax.Array:
        """[N] to [N]: at each token, the mean over its row's tokens under the mask."""
        return self.row_sum(values) / jnp.maximum(self.row_sum(jnp.ones_like(values)), 1.0)


class LossFn(Protocol):
    """What `ppo_step` calls for the policy's loss."""

    def __call__(self, config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss of each token [N], and per-token metrics [N] that are averaged over the batch."""
        ...


def ppo_clip(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective (Schulman et al., 2017), `-min(r A, clip(r, 1-eps_l, 1+eps_h) A)`.

    The two clips may differ (DAPO, Yu et al., 2025). With `config.dual_clip` c > 1 the loss of a
    negative advantage is at most `-c A` (Ye et al., 2020).
    """
    loss, metrics = _clipped(config, exp_ratio(x.logprobs - x.old_logprobs), x.advantages)
    if config.dual_clip:
        bound = -config.dual_clip * x.advantages
        over = (x.advantages < 0) & (loss > bound)
        loss = jnp.where(over, bound, loss)
        metrics["dual_clip_fraction"] = over.astype(jnp.float32)
    return loss, metrics


def gspo(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """GSPO (Zheng et al., 2025): PPO's objective on the ratio of a row, `s = (pi/pi_old)^(1/|y|)`.

    It is the paper's token form, `s_t = sg(s) pi_t / sg(pi_t)`: of value s, and with its gradient
    where a row's tokens share an advantage. `s` is near 1, so the paper's clips are 3e-4 and 4e-4,
    and its mean is that of `aggregation="sequence_mean"`.
    """
    log_s = lax.stop_gradient(x.row_mean(x.logprobs - x.old_logprobs))
    log_s_t = log_s + x.logprobs - lax.stop_gradient(x.logprobs)
    return _clipped(config, exp_ratio(log_s_t), x.advantages)


def cispo(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """CISPO (MiniMax-M1, 2025), `-sg(clip(r, 1-eps_l, 1+eps_h)) A log pi`.

    The weight is clipped, not the update: every token keeps a gradient. The paper has no lower
    clip in effect (`clip_low=1`).
    """
    ratio = lax.stop_gradient(exp_ratio(x.logprobs - x.old_logprobs))
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    metrics = {"clip_fraction": (clipped != ratio).astype(jnp.float32)}
    return -clipped * x.advantages * x.logprobs, metrics


def policy_gradient(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The policy gradient with importance weights, `-r A` (Williams, 1992), never clipped."""
    return -exp_ratio(x.logprobs - x.old_logprobs) * x.advantages, {}


def exp_ratio(log_ratio: jax.Array) -> jax.Array:
    """`exp`, finite for any argument."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(
    config: PPOConfig, ratio: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = jnp.maximum(-ratio * advantages, -clipped * advantages)
    metrics = {"clip_fraction": (clipped * advantages < ratio * advantages).astype(jnp.float32)}
    return loss, metrics


def named(name: str) -> LossFn:
    """The loss that `ppo.loss` names: one of `LOSSES`, or one's own as `my_file.py:my_loss`."""
    return LOSSES[name] if name in LOSSES else load_own(name)


LOSSES: dict[str, LossFn] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
