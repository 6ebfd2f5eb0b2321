"""Advantages: how much better a token, or a completion, was than expected."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax.config import PPOConfig
from orbit_jax.own_code import load_own
from orbit_jax.rl.rows import last_token, row_sums, to_tokens


@struct.dataclass
class Experience:
    """What an advantage is computed from: M micro-batches of R rows, N tokens each.

    Attributes:
      mask: [M, N] bool, the sampled tokens of rows that count.
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


def grpo(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """GRPO's `(r - mean) / std` over the rows of a prompt (Shao et al., 2024).

    Rows that do not count stand aside without touching their group. A group whose rewards are all
    equal has advantage 0; `config.std_floor` keeps nearly equal ones from exploding. The spread is
    that of a sample (n - 1), as in TRL.
    """
    centred = _centred(x, x.groups)
    spread = jnp.sqrt(_mean_of(jnp.square(centred), x, x.groups, less=1.0))
    return _by_token(x, centred / jnp.maximum(spread, config.std_floor))


def dr_grpo(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """Dr. GRPO's `r - mean` over the rows of a prompt (Liu et al., 2025): no spread divides it."""
    return _by_token(x, _centred(x, x.groups))


def rloo(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """RLOO (Ahmadian et al., 2024): a row's reward less the mean of its prompt's other rows.

    That is `n / (n - 1)` times the difference from the mean of all n. Alone a row has 0.
    """
    count = _count_of(x, x.groups)
    return _by_token(x, _centred(x, x.groups) * count / jnp.maximum(count - 1.0, 1.0))


def reinforce(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """REINFORCE (Williams, 1992) with the mean reward of the batch as baseline."""
    return _by_token(x, _centred(x, jnp.zeros_like(x.groups)))


def reinforce_pp(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """REINFORCE++ (Hu, 2025): a token's reward to go, standardised over the batch's tokens.

    The row's reward stands at its last sampled token, what KL in the reward costs at each token.
    """
    nothing = jnp.zeros_like(x.last_values)
    to_go = jax.vmap(lambda *a: generalised_advantages(*a, config.gamma, 1.0))(
        _token_rewards(x), jnp.zeros_like(x.values), x.mask, x.rows, nothing
    )
    return _standardised(config, x, to_go), jnp.zeros_like(x.values)


def reinforce_pp_baseline(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """REINFORCE++ with baseline (Hu, 2025): `r - mean` over a prompt's rows, then standardised.

    The second mean is over the batch's tokens, so where rows differ in length a group whose rewards
    are all equal is near 0, not at it.
    """
    advantages, returns = dr_grpo(config, x)
    return _standardised(config, x, advantages), returns


def gae(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation with a critic (Schulman et al., 2016).

    The row's reward stands at its last sampled token. A truncated row goes on with the critic's
    value after its last token when `config.bootstrap_truncated`, else it counts as finished.
    Advantages are standardised over the batch when `config.whiten`.
    """
    after = jnp.where(x.truncated & config.bootstrap_truncated, x.last_values, 0.0)
    advantages = jax.vmap(lambda *a: generalised_advantages(*a, config.gamma, config.lam))(
        _token_rewards(x), x.values, x.mask, x.rows, after
    )
    returns = advantages + x.values
    return _standardised(config, x, advantages) if config.whiten else advantages, returns


def generalised_advantages(
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


def _centred(x: Experience, groups: jax.Array) -> jax.Array:
    """[M, R] what a row's reward, less its tokens' penalties, is above the mean of its group.

    Rows that do not count have 0 and no part in the mean.
    """
    per_row = jax.vmap(lambda one, rows: row_sums(one, rows, x.rewards.shape[1]))
    score = x.rewards - per_row(jnp.where(x.mask, x.penalty, 0.0), x.rows)
    # Counted from the group's lowest score, equal scores are exactly 0 and so is their mean.
    flat = jnp.where(x.counted, score, jnp.inf).reshape(-1)
    lowest = jax.ops.segment_min(flat, groups.reshape(-1), x.num_groups)[groups]
    score = jnp.where(x.counted, score - lowest, 0.0)
    return jnp.where(x.counted, score - _mean_of(score, x, groups), 0.0)


def _mean_of(values: jax.Array, x: Experience, groups: jax.Array, less: float = 0.0) -> jax.Array:
    """[M, R] for each row its group's sum over rows that count, by their number minus `less`."""
    total = jnp.where(x.counted, values, 0.0).reshape(-1)
    total = jax.ops.segment_sum(total, groups.reshape(-1), x.num_groups)[groups]
    return total / jnp.maximum(_count_of(x, groups) - less, 1.0)


def _count_of(x: Experience, groups: jax.Array) -> jax.Array:
    """[M, R] f32, for each row how many rows of its group count."""
    counted = x.counted.reshape(-1).astype(jnp.float32)
    return jax.ops.segment_sum(counted, groups.reshape(-1), x.num_groups)[groups]


def _by_token(x: Experience, per_row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The advantage of a row at each of its tokens, and no returns."""
    return jax.vmap(to_tokens)(per_row, x.rows), jnp.zeros_like(x.values)


def _token_rewards(x: Experience) -> jax.Array:
    """[M, N] the row's reward at its last sampled token, less the penalty at each."""
    last = jax.vmap(lambda mask, rows: last_token(mask, rows, x.rewards.shape[1]))(x.mask, x.rows)
    at = jax.vmap(lambda place, r: jnp.zeros(x.rows.shape[1]).at[place].set(r, mode="drop"))
    return at(last, x.rewards) - x.penalty


def _standardised(config: PPOConfig, x: Experience, advantages: jax.Array) -> jax.Array:
    """[M, N] with mean 0 and spread 1 over all tokens under the mask."""
    count = jnp.maximum(x.mask.sum(), 1)
    # Counted from the lowest, equal advantages are exactly 0 and so is their mean.
    lowest = jnp.where(x.mask, advantages, jnp.inf).min()
    above = jnp.where(x.mask, advantages - lowest, 0.0)
    centred = jnp.where(x.mask, above - above.sum() / count, 0.0)
    std = jnp.sqrt(jnp.square(centred).sum() / count)
    return centred / jnp.maximum(std, config.std_floor)


def named(name: str) -> AdvantageFn:
    """The advantage that `ppo.advantage` names: one of `ADVANTAGES`, or one's own by its file."""
    return ADVANTAGES[name] if name in ADVANTAGES else load_own(name)


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reinforce_pp": reinforce_pp,
    "reinforce": reinforce,
    "gae": gae,
}
