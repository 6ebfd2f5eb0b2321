"""KL(p || q) of the policy p from a reference q: estimators, the loss, the coefficient.

The estimators (Schulman, 2020) take log-probs of tokens drawn from p. k1 and k3 have the value of
the KL in expectation, k2 nearly so. Taken from the reward, k1 also has its gradient; the others are
penalties of their own. In the loss it is the other way round: of the three only k2 has the gradient
of the KL, that of k1 is 0 in expectation and that of k3 is of KL(q || p). Hence `in_loss`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.config import PPOConfig
from orbit_jax.rl.losses import MAX_LOG_RATIO


def k1(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """`log p - log q`: unbiased, of either sign."""
    return logprobs - other


def k2(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """Half the squared log-ratio: biased where p and q are far apart, never negative."""
    return 0.5 * jnp.square(logprobs - other)


def k3(logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """`q/p - 1 - log(q/p)`: unbiased and never negative, finite for any difference."""
    delta = jnp.clip(other - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(delta) - delta


ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3}


def in_loss(estimator: str, logprobs: jax.Array, other: jax.Array) -> jax.Array:
    """Has the value of the estimator and, for tokens drawn from p, the gradient of KL(p || q)."""
    right = k2(logprobs, other)
    return right + lax.stop_gradient(ESTIMATORS[estimator](logprobs, other) - right)


def adapted(config: PPOConfig, coefficient: jax.Array, measured: jax.Array) -> jax.Array:
    """The next step's coefficient (Ziegler et al., 2019), nearer to where KL is on target.

    It grows by `1 / kl_horizon` of itself for each part that the measured KL is above the target,
    and shrinks likewise below, by a fifth of that at most. A horizon of 10 is the paper's.

    Args:
      measured: KL per token of the step's batch.
    """
    error = jnp.clip(measured / config.kl_target - 1.0, -0.2, 0.2)
    return coefficient * (1.0 + error / config.kl_horizon)
