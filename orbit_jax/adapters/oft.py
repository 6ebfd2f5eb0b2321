"""OFT in its input-centred form: `y = W (x R)`, with R orthogonal (OFTv2, Qiu et al., 2025).

R is made of blocks along the input, each the Cayley transform of a skew matrix. The frozen weight
is never rotated: its input is, so that a weight may stay packed.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from orbit_jax.quant.matmul import dot, dot_across, swap_leading
from orbit_jax.quant.qtensor import round_to

FEWEST_TERMS = 4  # below, PEFT's series is another one


@dataclass(frozen=True)
class OFT:
    """Rotation of the input; parameter `skew[..., blocks, b(b-1)/2]`, zero at the start.

    It is the strictly upper triangle of each block's Q, row by row.

    Attributes:
      block_size: b, which divides the input width.
      neumann_terms: of `R = (I+Q)(I + Q + Q^2 + ...)`, whose highest power is one less, as PEFT
        counts them; 0 is the whole series, `(I+Q)(I-Q)^-1`.
      block_share: one block for the whole input.
      shared: as of `LoRA`; a rotation is on the side of `a`: with `a` in it the experts of a layer
        have one, and the dimension of experts is 1.
    """

    block_size: int
    neumann_terms: int = 5
    block_share: bool = False
    shared: str = ""

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: a rotation needs at least 2")
        if self.neumann_terms and self.neumann_terms < FEWEST_TERMS:
            raise ValueError(
                f"neumann_terms={self.neumann_terms}: use at least {FEWEST_TERMS}, or 0 for the "
                "exact rotation"
            )

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """No rotation.

        Raises:
          ValueError: if the block size does not divide the input width.
        """
        return {"skew": jnp.zeros(self.shape(shape), jnp.float32)}

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the triangles for a weight of that shape."""
        *lead, _, width = shape
        b = self.block_size
        if width % b:
            raise ValueError(
                f"block_size={b} does not divide its input width {width}: choose a divisor, or "
                "leave the weight out of adapter.targets"
            )
        blocks = 1 if self.block_share else width // b
        return (*self._own(lead, 1), blocks, b * (b - 1) // 2)

    def _own(self, lead: list, one: int | None) -> tuple:
        """Layers have rotations of their own; so have experts, unless they share one."""
        return (*lead[:1], *(one for _ in lead[1:])) if "a" in self.shared else tuple(lead)

    def prepare(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """`turn[..., blocks, b, b]`, R - I in f32: of a small rotation bf16 keeps all of it."""
        return {"turn": _turn(self.block_size, self.neumann_terms, params["skew"])}

    def deviation(self, params: dict[str, jax.Array]) -> jax.Array:
        """The Frobenius norm of `R^T R - I` of each block `[..., blocks]`: 0 of a rotation."""
        turn = self.prepare(params)["turn"]
        back = jnp.swapaxes(turn, -1, -2)
        # (I + T)^T (I + T) - I, without the I that would round it off.
        off = turn + back + jnp.matmul(back, turn, precision="highest")
        return jnp.sqrt(jnp.square(off).sum((-1, -2)))

    def input_side(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """`x R`, rounded once."""
        return round_to(x.astype(jnp.float32) + _by_block(dot_across, x, params["turn"]), x.dtype)

    def output_side(self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        """OFT leaves the output alone."""
        return y

    def output_side_transposed(
        self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """Of the transposed weight the output is rotated, backwards: `y R^T` for `y[N, in]`."""
        return y + _by_block(dot, round_to(y, x.dtype), params["turn"])

    def merge(self, params: dict[str, jax.Array], w: jax.Array) -> jax.Array:
        """`W R^T`: the columns of each block are rotated."""
        turn = self.prepare(params)["turn"]
        blocks = jnp.swapaxes(w.reshape(*w.shape[:-1], -1, self.block_size), -2, -3)
        moved = jnp.matmul(blocks, jnp.swapaxes(turn, -1, -2), precision="highest")
        return w + jnp.swapaxes(moved, -2, -3).reshape(w.shape)

    def count(self, shape: tuple[int, ...]) -> int:
        """b(b-1)/2 for every block of every matrix of the stack, less what is shared."""
        return math.prod(self.shape(shape))

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        """Rotations, stored and prepared, follow the weight's input."""
        *lead, _, width = spec
        blocks = PartitionSpec(*self._own(lead, None), None if self.block_share else width)
        return {"skew": blocks, "turn": blocks}


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1))
def _turn(b: int, terms: int, skew: jax.Array) -> jax.Array:
    """R - I for the triangles `skew[..., b(b-1)/2]`.

    Between the barriers it is the same computation in every program, and has the same bits.
    """
    rows, columns = np.triu_indices(b, 1)
    triangles = lax.optimization_barrier(skew.reshape(-1, skew.shape[-1]))
    upper = jnp.zeros((len(triangles), b, b), jnp.float32).at[:, rows, columns].set(triangles)
    q, eye = upper - jnp.swapaxes(upper, 1, 2), jnp.eye(b)
    if terms:
        total = 2 * eye + q  # by Horner: Q (2 + Q (2 + ... + Q))
        for _ in range(terms - 3):
            total = 2 * eye + jnp.matmul(q, total, precision="highest")
        turn = jnp.matmul(q, total, precision="highest")
    else:
        turn = jnp.linalg.solve(eye - q, 2 * q)
    return lax.optimization_barrier(turn).reshape(*skew.shape[:-1], b, b)


def _by_block(product: Callable, x: jax.Array, turn: jax.Array) -> jax.Array:
    """`product` of each block of `x[N, width]` with its own of `turn[blocks, b, b]`, or with one.

    The result is f32.
    """
    blocks = x.reshape(len(x), -1, turn.shape[-1])
    if len(turn) == 1:
        return product(blocks.reshape(-1, turn.shape[-1]), turn[0]).reshape(x.shape)
    return swap_leading(jax.vmap(product)(swap_leading(blocks), turn)).reshape(x.shape)
