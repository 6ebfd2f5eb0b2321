"""Queries, keys and values of grouped-query attention."""

import jax
import jax.numpy as jnp

from orbit_jax import mesh
from orbit_jax.model.layers import Module
from orbit_jax.model.rope import rotate
from orbit_jax.quant.qtensor import round_to


def queries_keys_values(
    module: Module, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x[N, D]` to `q[N, H, hd]` and `k, v[N, K, hd]` in x's dtype; on a mesh to the own heads."""
    config = module.config
    own_heads, norm = mesh.shards_heads(config), config.qk_norm
    out = []
    for name in ("q", "k", "v"):
        whole = norm == "all" and name != "v"
        y = module.project(f"{name}_proj", x, gather=whole or not own_heads)
        if whole:
            y = module.norm(f"{name}_norm", y, y.dtype)
            y = mesh.own_columns(config.mesh, y) if own_heads else y
        if config.clip_qkv:
            y = jnp.clip(y, -config.clip_qkv, config.clip_qkv)
        y = y.reshape(y.shape[0], -1, config.head_dim)
        if name != "v":
            y = module.norm(f"{name}_norm", y, y.dtype) if norm == "head" else y
            y = round_to(rotate(config.rope, y.astype(jnp.float32), cos, sin), y.dtype)
        out.append(y)
    return tuple(out)


def sinks(module: Module) -> jax.Array | None:
    """The logit of each (own) head that adds nothing, `[H]` f32, or None."""
    config = module.config
    if not config.sinks:
        return None
    logits = module.vector("sinks").astype(jnp.float32)
    return mesh.own_columns(config.mesh, logits) if mesh.shards_heads(config) else logits
