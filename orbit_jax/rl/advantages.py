"""Advantages: how much better a token, or a completion, was than expected."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax.config import PPOConfig


@struct.dataclass
class Experience:
    """What an advantage is computed from: M micro-batches of R rows, N tokens each.

    Attributes:
      mask: [M, N] bool, the tokens that are trained on.
      rows: [M, N] int32 in [0, R]; R is padding.
      rewards: [M, R] f32, one score a row; 0 where the row does not count.
      counted: [M, R] bool, rows whose reward is to be believed.
      groups: [M, R] int32, which prompt a row answers.
      truncated: [M, R] bool, rows that ended at the length limit.
      penalty: [M, N] f32, subtracted from the reward at each token (KL in the reward).
      values: [M, N] f32, the critic's value before each token; 0 without a critic.
      last_values: [M, R] f32, its value after each row's last token.
      num_groups: static, an upper bound on `groups`.
    """

    mask: jax.Array
    rows: jax.Array
    rewards: jax.Array
    counted: jax.Array
    groups: jax.Array
    truncated: jax.Array
    penalty: jax.Array
    values: jax.Array
    last_values: jax.Array
    num_groups: int = struct.field(pytree_node=False)


class AdvantageFn(Protocol):
    """What `ppo_step` calls: advantages [M, N] and, for a critic, returns [M, N]."""

    def __call__(self, config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
        """Advantages of all tokens; only those under the mask are read."""
        ...


def group_relative(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """GRPO's `(r - mean) / std` over the rows of a prompt (Shao et al., 2024).

    Rows that do not count stand aside without touching their group. A group whose rewards are all
    equal has advantage 0; `config.std_floor` keeps nearly equal ones from exploding. The spread is
    that of a sample (n - 1), as in TRL.
    """
    per_row = jax.vmap(lambda p, r: jax.ops.segment_sum(p, r, x.rewards.shape[1] + 1)[:-1])
    score = x.rewards - per_row(jnp.where(x.mask, x.penalty, 0.0), x.rows)
    groups, counted = x.groups.reshape(-1), x.counted.reshape(-1).astype(jnp.float32)

    def mean_of_group(values: jax.Array, less: float = 0.0) -> jax.Array:
        total = jax.ops.segment_sum(values * counted, groups, x.num_groups)
        count = jax.ops.segment_sum(counted, groups, x.num_groups)
        return (total / jnp.maximum(count - less, 1.0))[groups]

    # Counted from the group's lowest score, equal scores are exactly 0 and so is their mean.
    score = jnp.where(x.counted, score, jnp.inf).reshape(-1)
    lowest = jax.ops.segment_min(score, groups, x.num_groups)[groups]
    score = jnp.where(counted > 0, score - lowest, 0.0)
    centred = score - mean_of_group(score)
    if config.scale_by_std:
        spread = jnp.sqrt(mean_of_group(jnp.square(centred), less=1.0))
        centred = centred / jnp.maximum(spread, config.std_floor)
    advantages = (centred * counted).reshape(x.rewards.shape)
    padded = jnp.pad(advantages, ((0, 0), (0, 1)))
    return jnp.take_along_axis(padded, x.rows, axis=1), jnp.zeros_like(x.values)


def generalised(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation with a critic (Schulman et al., 2016).

    The row's reward stands at its last trained token. A truncated row goes on with the critic's
    value after its last token when `config.bootstrap_truncated`, else it counts as finished.
    Advantages are standardised over the batch when `config.whiten`.
    """
    last = jax.vmap(last_token)(x.mask, x.rows, x.rewards)
    rewards = jax.vmap(lambda at, r: jnp.zeros(x.rows.shape[1]).at[at].set(r, mode="drop"))
    reward = rewards(last, x.rewards) - x.penalty
    after = jnp.where(x.truncated & config.bootstrap_truncated, x.last_values, 0.0)
    advantages = jax.vmap(lambda *a: gae(*a, config.gamma, config.lam))(
        reward, x.values, x.mask, x.rows, after
    )
    returns = advantages + x.values
    if config.whiten:
        count = jnp.maximum(x.mask.sum(), 1)
        mean = jnp.where(x.mask, advantages, 0.0).sum() / count
        centred = jnp.where(x.mask, advantages - mean, 0.0)
        std = jnp.sqrt(jnp.square(centred).sum() / count)
        advantages = centred / jnp.maximum(std, config.std_floor)
    return advantages, returns


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    rows: jax.Array,
    after: jax.Array,
    gamma: float,
    lam: float,
) -> jax.Array:
    """Advantages [N] of a stream of contiguous rows, as if the tokens not under `mask` were absent.

    Args:
      rewards, values: [N] f32, the reward of a token and the value before it.
      mask: [N] bool.
      rows: [N] int32.
      after: [R] f32, the value of the state after each row's last token.
      gamma, lam: discount and GAE's lambda, per token under the mask.
    """
    after = jnp.pad(after, (0, 1))

    def back(carry: tuple, x: tuple) -> tuple[tuple, jax.Array]:
        row, next_value, next_advantage = carry
        reward, value, on, this_row = x
        new_row = this_row != row
        next_value = jnp.where(new_row, after[this_row], next_value)
        next_advantage = jnp.where(new_row, 0.0, next_advantage)
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (
            this_row,
            jnp.where(on, value, next_value),
            jnp.where(on, advantage, next_advantage),
        )
        return carry, jnp.where(on, advantage, 0.0)

    start = (jnp.int32(-1), jnp.float32(0), jnp.float32(0))
    return lax.scan(back, start, (rewards, values, mask, rows), reverse=True)[1]


def last_token(mask: jax.Array, rows: jax.Array, per_row: jax.Array) -> jax.Array:
    """[R] index of each row's last token under the mask, N (out of range) where there is none."""
    n, r = rows.shape[0], per_row.shape[0]
    place = jnp.where(mask, jnp.arange(n), -1)
    last = jax.ops.segment_max(place, rows, r + 1)[:r]
    return jnp.where(last >= 0, last, n)


ADVANTAGES: dict[str, AdvantageFn] = {"group_relative": group_relative, "gae": generalised}
