"""A mixture of experts without dropped tokens: the router, and what the experts make together."""

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax import exchange
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.experts import count_choices, mix_experts
from orbit_jax.model.layers import Module
from orbit_jax.quant.matmul import matmul_exact, over_rows


def route(module: Module, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The router: experts `[N, k]` int32 in ascending order, and their f32 weights `[N, k]`."""
    config = module.config
    logits = matmul_exact(x, module.weights["gate"], (module.layer,))
    logits = exchange.gather_columns(config.mesh, logits)
    if config.router == "chosen":
        logits = logits + module.vector("gate_bias").astype(jnp.float32)
        best, experts = lax.top_k(logits, config.top_k)
        weights = jax.nn.softmax(best, axis=-1)
    elif config.router == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        preference = scores + module.vector("e_score_correction_bias").astype(jnp.float32)
        _, experts = lax.top_k(_in_best_groups(config, preference), config.top_k)
        weights = jnp.take_along_axis(scores, experts, -1)
    else:
        # Ties go to the lower index, here and above.
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), config.top_k)
    if config.norm_topk_prob:
        floor = 1e-20 if config.router == "sigmoid" else 0.0
        weights = weights / (weights.sum(axis=-1, keepdims=True) + floor)
    if config.routed_scale != 1.0:
        weights = weights * config.routed_scale
    order = jnp.argsort(experts, axis=-1)
    return jnp.take_along_axis(experts, order, -1), jnp.take_along_axis(weights, order, -1)


def _in_best_groups(config: ModelConfig, preference: jax.Array) -> jax.Array:
    """Preferences `[N, E]`, -inf outside the groups whose two best experts sum highest."""
    if config.num_groups == 1:
        return preference
    groups = preference.reshape(-1, config.num_groups, config.num_experts // config.num_groups)
    best, _ = lax.top_k(groups, min(2, groups.shape[-1]))
    _, chosen = lax.top_k(best.sum(axis=-1), config.top_groups)
    allowed = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(preference.shape)


def moe(module: Module, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Feed-forward of `x[N, D]` through each token's chosen experts.

    Args:
      module: with the router `gate` and the `experts`.
      valid: [N] bool; padding reaches no expert.

    Returns:
      Own tokens of `[N, D]` in x's dtype, and how many tokens chose each expert, `[E]` int32.
    """
    config = module.config
    experts, mixing = over_rows(lambda rows: route(module, rows), config.tile, x)
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    everyone = exchange.gather_for_experts(config.mesh, experts)
    load = count_choices(everyone, config.num_experts)
    return mix_experts(module.below("experts"), x, experts, mixing), load
