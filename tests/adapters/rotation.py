"""A toy adapter from outside the package: it rotates what goes into a weight."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from orbit_jax.quant.matmul import dot
from orbit_jax.quant.qtensor import round_to


@dataclass(frozen=True)
class Rotation:
    """`y = W (R x)`; the parameter `r[..., in, in]` starts as the identity."""

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        *lead, _, width = shape
        return {"r": jnp.broadcast_to(jnp.eye(width), (*lead, width, width))}

    def input_side(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return round_to(dot(x, params["r"]), x.dtype)

    def output_side(self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return y

    def merge(self, params: dict[str, jax.Array], w: jax.Array) -> jax.Array:
        return jnp.matmul(w, params["r"], precision="highest")

    def count(self, shape: tuple[int, ...]) -> int:
        *lead, _, width = shape
        return math.prod(lead) * width * width

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        *lead, _, width = spec
        return {"r": PartitionSpec(*lead, width, None)}
