"""Weights for tokens that another policy sampled than the one that is trained."""

import jax
import jax.numpy as jnp

from orbit_jax.config import PPOConfig
from orbit_jax.rl.losses import exp_ratio
from orbit_jax.rl.rows import row_sums, to_tokens


def importance_weights(
    config: PPOConfig, own: jax.Array, sampled: jax.Array, rows: jax.Array, num_rows: int
) -> jax.Array:
    """[M, N] f32: `w = pi_own / pi_sampled` of each token, or of its row, held to a limit C.

    `config.correction` says how. `token_tis`: w of the token, at most C (truncated importance
    sampling, Espeholt et al., 2018); `sequence_tis`: the same of the product over the row.
    `token_mask` and `sequence_mask`: w where it is within [1/C, C], else 0: what is dropped so
    still counts as a token or a row where the loss is averaged.

    Args:
      own: [M, N] f32, the trainer's log-probs before the first update; 0 outside the mask.
      sampled: [M, N] f32, the sampler's, likewise.
      rows: [M, N] int32 in [0, R]; R is padding.
      num_rows: R.
    """
    limit, (level, kind) = config.max_importance_weight, config.correction.split("_")
    log_weight = own - sampled
    if level == "sequence":
        of_row = lambda one, row: to_tokens(row_sums(one, row, num_rows), row)  # noqa: E731
        log_weight = jax.vmap(of_row)(log_weight, rows)
    weight = exp_ratio(log_weight)
    if kind == "mask":
        return jnp.where((weight >= 1 / limit) & (weight <= limit), weight, 0.0)
    return jnp.minimum(weight, limit)
