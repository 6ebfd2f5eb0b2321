"""The row-wise pieces of a layer: norm, linear map with its adapter, gated activation."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax import exchange
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.matmul import matmul
from orbit_jax.quant.qtensor import QTensor, Unstacked, round_to

# What these make on the way is made again in a backward pass: keeping it, in f32, would be most of
# the memory of a training step.
_remade = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_remade, static_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    """RMSNorm over the last dimension, f32 inside, rounded once to `dtype`."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return round_to(wide * scale * weight.astype(jnp.float32), dtype)


def linear(
    x: jax.Array,
    weight: QTensor | Unstacked | jax.Array,
    index: Sequence[jax.Array | int],
    adapter: Adapter | None,
    name: str,
    *,
    bias: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`x[N, in]` through the weight at `index` of its stack and what is attached under `name`.

    Returns `[N, out]` in `dtype`, by default that of x. The parameters are already of this layer,
    and so is the `bias[out]`.
    """
    attached = adapter.below(name) if adapter else None
    if attached is None:
        y = matmul(x, weight, index)
    else:
        # Cast here and not for the whole model, so that gradients of blocks and tiles add in f32.
        method, params = attached.method_at(), attached.cast(x.dtype).params
        y = matmul(method.input_side(params, x), weight, index)
        y = method.output_side(params, x, y)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return round_to(y, dtype or x.dtype)


@dataclass(frozen=True)
class Module:
    """The weights of one module of one layer, and what is attached to them.

    Attributes:
      weights: a part of a stack of the base.
      layer: which layer of the stack.
      adapter: the parameters of that layer, rooted at the same module.
    """

    config: ModelConfig
    weights: dict
    layer: jax.Array
    adapter: Adapter | None

    def below(self, name: str) -> "Module":
        """The module of that name in this one."""
        adapter = self.adapter.below(name) if self.adapter else None
        return Module(self.config, self.weights[name], self.layer, adapter)

    def vector(self, name: str) -> jax.Array:
        """A norm, a bias or the like."""
        return self.weights[name][self.layer]

    def norm(self, name: str, x: jax.Array, dtype: jnp.dtype, eps: float = 0.0) -> jax.Array:
        """RMSNorm of x with the scale of that name."""
        return rms_norm(x, self.vector(name), eps or self.config.rms_norm_eps, dtype)

    def project(
        self, name: str, x: jax.Array, *, gather: bool = True, dtype: jnp.dtype | None = None
    ) -> jax.Array:
        """`x[N, in]` through the linear layer of that name: `[N, out]`.

        Without `gather` each device of a mesh keeps the columns that it has.
        """
        bias = self.vector(f"{name}_bias") if f"{name}_bias" in self.weights else None
        weight = self.weights[name]
        y = linear(x, weight, (self.layer,), self.adapter, name, bias=bias, dtype=dtype)
        return exchange.gather_columns(self.config.mesh, y) if gather else y


@functools.partial(_remade, static_argnums=(2, 3))
def swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """`silu(gate) * up`, f32 inside; with a limit gpt-oss' form of it.

    That is `gate * sigmoid(alpha * gate) * (up + 1)`, with the gate held below the limit and `up`
    within it on both sides.
    """
    gate, up, dtype = gate.astype(jnp.float32), up.astype(jnp.float32), gate.dtype
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return round_to((up + 1) * (gate * jax.nn.sigmoid(gate * alpha)), dtype)
    return round_to(gate * jax.nn.sigmoid(gate) * up, dtype)


def feed_forward(module: Module, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A dense gated feed-forward part, `[N, D]` to own columns of `[N, D]` in `dtype`."""
    gate, up = (module.project(name, x, gather=False) for name in ("gate_proj", "up_proj"))
    config = module.config
    inner = swiglu(gate, up, config.swiglu_limit, config.swiglu_alpha)
    inner = exchange.gather_columns(config.mesh, inner)
    return module.project("down_proj", inner, gather=False, dtype=dtype)
