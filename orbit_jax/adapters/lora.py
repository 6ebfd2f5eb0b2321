"""LoRA (Hu et al., 2021): `y = W x + scale * B (A x)`, with B zero at the start."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from orbit_jax.quant.matmul import dot, dot_across
from orbit_jax.quant.qtensor import round_to


@dataclass(frozen=True)
class LoRA:
    """Low-rank update of the output; parameters `a[..., R, in]` and `b[..., out, R]`.

    Attributes:
      rank: R.
      alpha: the scale is `alpha / rank`, or `alpha / sqrt(rank)` when `rank_stabilized`
        (rsLoRA, Kalajdzievski, 2023).
    """

    rank: int
    alpha: float
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """A as PEFT draws it (uniform, Kaiming with a = sqrt(5)), B zero."""
        *lead, out, width = shape
        bound = 1 / math.sqrt(width)
        a = jax.random.uniform(key, (*lead, self.rank, width), jnp.float32, -bound, bound)
        return {"a": a, "b": jnp.zeros((*lead, out, self.rank), jnp.float32)}

    def input_side(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """LoRA leaves the input alone."""
        return x

    def output_side(self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        """`y + B (scale * A x)`; the rank-R intermediate is rounded to the compute dtype."""
        low = round_to(dot(x, params["a"]) * self.scale, x.dtype)
        return y + dot(low, params["b"])

    def merge(self, params: dict[str, jax.Array], w: jax.Array) -> jax.Array:
        """`W + scale * B A`."""
        return w + self.scale * jnp.matmul(params["b"], params["a"], precision="highest")

    def output_side_transposed(
        self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """The same update of the transposed weight: `y + (scale * x B) A` for `x[N, out]`."""
        low = round_to(dot_across(x, params["b"]) * self.scale, x.dtype)
        return y + dot_across(low, params["a"])

    def transposed(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Parameters of the same update of the transposed weight `[..., in, out]`."""
        return {"a": jnp.swapaxes(params["b"], -1, -2), "b": jnp.swapaxes(params["a"], -1, -2)}

    def count(self, shape: tuple[int, ...]) -> int:
        """R * (in + out) for every matrix of the stack."""
        *lead, out, width = shape
        return math.prod(lead) * self.rank * (out + width)

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        """A follows the weight's input, B its output."""
        *lead, out, width = spec
        return {"a": PartitionSpec(*lead, None, width), "b": PartitionSpec(*lead, out, None)}
