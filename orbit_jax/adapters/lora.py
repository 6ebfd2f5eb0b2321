"""LoRA (Hu et al., 2021): `y = W x + scale * B (A x)`, with B zero at the start."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

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
      shared: factors that all experts of a layer have in common: `a`, `b`, both or none. Their
        dimension of experts is then 1.
      initialization: how A is drawn, `kaiming`, `gaussian` or `orthogonal`; no part of what an
        adapter is.
    """

    rank: int
    alpha: float
    rank_stabilized: bool = False
    shared: str = ""
    initialization: str = field(default="kaiming", repr=False, compare=False)

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """A drawn, B zero: the adapted weight is the base's."""
        shape_a, shape_b = self._shapes(shape)
        a = INITIALIZATIONS[self.initialization](key, shape_a)
        return {"a": a, "b": jnp.zeros(shape_b, jnp.float32)}

    def _shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        *lead, out, width = shape
        one = (*lead[:1], *(1 for _ in lead[1:]))  # layers differ, experts do not
        of_a, of_b = (one if factor in self.shared else lead for factor in "ab")
        return (*of_a, self.rank, width), (*of_b, out, self.rank)

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
        """R * (in + out) for every matrix of the stack, less what is shared."""
        return sum(map(math.prod, self._shapes(shape)))

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        """A follows the weight's input, B its output."""
        *lead, out, width = spec
        one = (*lead[:1], *(None for _ in lead[1:]))
        of_a, of_b = (one if factor in self.shared else lead for factor in "ab")
        return {"a": PartitionSpec(*of_a, None, width), "b": PartitionSpec(*of_b, out, None)}


def _kaiming(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform within `1/sqrt(in)`: PEFT's, Kaiming with a = sqrt(5)."""
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def _gaussian(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Normal with a deviation of `1/R`, as the paper's code and PEFT's "gaussian"."""
    return jax.random.normal(key, shape) / shape[-2]


def _orthogonal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Orthonormal rows, or columns where R is above the width, of matrices drawn by Haar."""
    *lead, rank, width = shape
    q, r = jnp.linalg.qr(jax.random.normal(key, (*lead, max(rank, width), min(rank, width))))
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    return q if rank > width else jnp.swapaxes(q, -1, -2)


# By `adapter.initialization`: A [..., R, in] in f32.
INITIALIZATIONS: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "kaiming": _kaiming,
    "gaussian": _gaussian,
    "orthogonal": _orthogonal,
}
