"""A loss, an advantage and an adapter of one's own; copy this file and name yours in the config.

    python experiments/ppo_math.py --config.ppo.loss=experiments/own_rl.py:tapered \\
        --config.ppo.advantage=experiments/own_rl.py:low_baseline \\
        --config.adapter.method=experiments/own_rl.py:gains

Any of the three goes with the package's own others. What they may read, and the shapes, is told by
`orbit_jax/rl/losses.py`, `rl/advantages.py` and `adapters/adapter.py`. A run keeps a hash of the
file, and does not go on with another one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from orbit_jax.adapter_config import AdapterConfig
from orbit_jax.ppo_config import PPOConfig
from orbit_jax.rl.advantages import Experience, dr_grpo
from orbit_jax.rl.losses import Tokens, exp_ratio


def tapered(config: PPOConfig, x: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    """TOPR (Le Roux et al., 2025): what went well is imitated, what did not is weighed down.

    `-A log pi` where A > 0, else `-sg(min(r, 1)) A log pi` by the ratio r of the whole row.
    """
    ratio = exp_ratio(x.row_sum(x.logprobs - x.old_logprobs))
    weight = lax.stop_gradient(jnp.where(x.advantages > 0, 1.0, jnp.minimum(ratio, 1.0)))
    return -weight * x.advantages * x.logprobs, {"taper": weight}


def low_baseline(config: PPOConfig, x: Experience) -> tuple[jax.Array, jax.Array]:
    """AsymRE (Arnal et al., 2025): `r - V`, with V 0.1 below the mean over a prompt's rows."""
    advantages, returns = dr_grpo(config, x)
    return advantages + 0.1, returns


def gains(adapter: AdapterConfig) -> "Gains":
    """The method of all adapted weights, from the section `adapter` of the config."""
    return Gains()


@dataclasses.dataclass(frozen=True)
class Gains:
    """(IA)^3 (Liu et al., 2022): `y = (1 + g) * W x`, a gain for each output; g is 0 at first."""

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """`g[..., out]` for a weight `[..., out, in]`."""
        return {"g": jnp.zeros(shape[:-1], jnp.float32)}

    def input_side(self, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """The input stays as it is."""
        return x

    def output_side(self, params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        """In f32; the model rounds the result once."""
        return y * (1 + params["g"].astype(jnp.float32))

    def merge(self, params: dict[str, jax.Array], w: jax.Array) -> jax.Array:
        """The weight's rows, scaled."""
        return w * (1 + params["g"])[..., None]

    def count(self, shape: tuple[int, ...]) -> int:
        """One for each row of each matrix."""
        return math.prod(shape[:-1])

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        """Gains follow the weight's output."""
        return {"g": PartitionSpec(*spec[:-1])}
