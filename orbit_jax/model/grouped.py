"""Queries, keys and values of grouped-query attention."""

import jax
import jax.numpy as jnp

from orbit_jax.model.layers import Module
from orbit_jax.model.rope import rotate
from orbit_jax.quant.qtensor import round_to


def queries_keys_values(
    module: Module, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x[N, D]` to `q[N, H, hd]` and `k, v[N, K, hd]` in x's dtype; of queries to the own heads."""
    config, norm, out = module.config, module.config.qk_norm, []
    for name in ("q", "k", "v"):
        own = name == "q" and config.own_heads
        y = module.project(f"{name}_proj", x, gather=not own)
        if norm == "all" and name != "v":
            y = module.norm(f"{name}_norm", y, y.dtype)
        if config.clip_qkv:
            y = jnp.clip(y, -config.clip_qkv, config.clip_qkv)
        y = y.reshape(y.shape[0], -1, config.head_dim)
        if name != "v":
            y = module.norm(f"{name}_norm", y, y.dtype) if norm == "head" else y
            y = round_to(rotate(config.rope, y.astype(jnp.float32), cos, sin), y.dtype)
        out.append(y)
    return tuple(out)


def sinks(module: Module) -> jax.Array | None:
    """The logit of each head that adds nothing, `[H]` f32, or None."""
    return module.vector("sinks").astype(jnp.float32) if module.config.sinks else None
