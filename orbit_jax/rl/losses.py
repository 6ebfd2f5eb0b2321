"""Per-token losses and KL estimators, in the papers' symbols.

Every function takes [N] arrays over tokens and returns [N] arrays; the step masks, sums and divides
by the one token count of the optimiser batch, so that no mean of means can arise.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.config import PPOConfig

_MAX_LOG_RATIO = 20.0  # exp stays finite, and no ratio that matters is that large


class LossFn(Protocol):
    """What `ppo_step` calls for the policy's loss."""

    def __call__(
        self, config: PPOConfig, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss of each token, and per-token metrics that are averaged over the batch."""
        ...


def ppo_clip(
    config: PPOConfig, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective (Schulman et al., 2017), `-min(r A, clip(r, 1-eps_l, 1+eps_h) A)`.

    The two clips may differ (DAPO, Yu et al., 2025). With `config.dual_clip` c > 1 the loss of a
    negative advantage is at most `-c A` (Ye et al., 2020).
    """
    ratio = jnp.exp(jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = jnp.maximum(-ratio * advantages, -clipped * advantages)
    metrics = {"clip_fraction": (clipped * advantages < ratio * advantages).astype(jnp.float32)}
    if config.dual_clip:
        bound = -config.dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss = jnp.where(over, bound, loss)
        metrics["dual_clip_fraction"] = over.astype(jnp.float32)
    return loss, metrics


def k1(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """`log p - log q`: the unbiased, signed estimate of KL(p || q) on tokens drawn from p."""
    return logprobs - other


def k3(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """`q/p - 1 - log(q/p)`, never negative (Schulman, 2020), finite for any difference."""
    delta = jnp.clip(other - logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.expm1(delta) - delta


def kl_in_loss(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """Has the value of k3 and, on tokens drawn from p, the expected gradient of KL(p || q).

    Differentiating k3 itself gives the gradient of KL(q || p) instead; half the squared log-ratio
    has the right one.
    """
    half_square = 0.5 * jnp.square(logprobs - other)
    return half_square + lax.stop_gradient(k3(logprobs, other) - half_square)
