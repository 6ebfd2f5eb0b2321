"""How the losses of tokens make one number: a weight for each token of an optimiser batch.

Weights are of the whole batch, so that no split into micro-batches or over devices shows.
"""

import jax
import jax.numpy as jnp

from orbit_jax.rl.rows import row_sums, to_tokens


def token_weights(
    how: str, trained: jax.Array, rows: jax.Array, num_rows: int, max_completion_tokens: int
) -> jax.Array:
    """[M, N] f32: by what each token's loss is multiplied before all are summed; 0 if not trained.

    Args:
      how: `token_mean`, the mean over all tokens (DAPO, Yu et al., 2025); `sequence_mean`, the mean
        over rows of the means over their tokens (GRPO, Shao et al., 2024); `constant_length`, the
        sum over tokens by the number of rows and the longest that a completion may be (Dr. GRPO,
        Liu et al., 2025). Rows without a trained token are no rows here.
      trained: [M, N] bool, M micro-batches of N tokens.
      rows: [M, N] int32 in [0, R], counted in each micro-batch; R is padding.
      num_rows: R.
      max_completion_tokens: of a row.
    """
    on = trained.astype(jnp.float32)
    if how == "token_mean":
        return on / jnp.maximum(on.sum(), 1.0)
    lengths = jax.vmap(lambda one, row: row_sums(one, row, num_rows))(on, rows)
    count = jnp.maximum((lengths > 0).sum(), 1)
    if how == "constant_length":
        return on / (count * max_completion_tokens)
    return on / (count * jnp.maximum(jax.vmap(to_tokens)(lengths, rows), 1.0))
