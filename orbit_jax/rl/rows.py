"""From the tokens of a stream to its R rows and back; the row R is padding."""

import jax
import jax.numpy as jnp


def row_sums(values: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """[N] to [R]: the sum over each row's tokens."""
    return jax.ops.segment_sum(values, rows, num_rows + 1)[:num_rows]


def to_tokens(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """[R] to [N]: the value of each token's row, zero at padding."""
    return jnp.pad(per_row, (0, 1))[rows]


def last_token(mask: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """[R] index of each row's last token under the mask, N (out of range) where there is none."""
    n = rows.shape[0]
    place = jnp.where(mask, jnp.arange(n), -1)
    last = jax.ops.segment_max(place, rows, num_rows + 1)[:num_rows]
    return jnp.where(last >= 0, last, n)
