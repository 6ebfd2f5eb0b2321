"""The row-wise pieces of a layer: norm, linear map with its adapter, gated activation."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.adapters.adapter import Adapter, at
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
    *names: str,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`x[N, in]` through the weight at `index` of its stack and the adapter found under `names`.

    Returns `[N, out]` in `dtype`, by default that of x. The parameters are already of this layer.
    """
    params = at(adapter.params, *names) if adapter else None
    if params is None:
        return round_to(matmul(x, weight, index), dtype or x.dtype)
    # Cast here and not for the whole model, so that gradients of blocks and tiles add up in f32.
    params = jax.tree.map(lambda p: p.astype(x.dtype), params)
    y = matmul(adapter.method.input_side(params, x), weight, index)
    return round_to(adapter.method.output_side(params, x, y), dtype or x.dtype)


@_remade
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, f32 inside."""
    gate, dtype = gate.astype(jnp.float32), gate.dtype
    return round_to(gate * jax.nn.sigmoid(gate) * up.astype(jnp.float32), dtype)
