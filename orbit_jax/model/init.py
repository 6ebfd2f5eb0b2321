"""Random weights of a model, and freezing a trained tree of floats into the packed base."""

import math

import jax
import jax.numpy as jnp

from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import from_float
from orbit_jax.quant.quantize import quantize


def init_weights(config: ModelConfig, key: jax.Array, scale: float = 1.0) -> dict:
    """A tree of f32 arrays shaped like the base, drawn normal with deviation scale/sqrt(in)."""
    keys = iter(jax.random.split(key, 16 * len(config.stacks) + 2))
    d, h, kv, hd = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * scale / math.sqrt(shape[-1])

    def feed_forward(width: int, *lead: int) -> dict:
        return {
            "gate_proj": matrix(*lead, width, d),
            "up_proj": matrix(*lead, width, d),
            "down_proj": matrix(*lead, d, width),
        }

    layers = []
    for sparse, n in config.stacks:
        attention = {
            "q_proj": matrix(n, h * hd, d),
            "k_proj": matrix(n, kv * hd, d),
            "v_proj": matrix(n, kv * hd, d),
            "o_proj": matrix(n, d, h * hd),
        }
        if config.qk_norm:
            attention |= {"q_norm": jnp.ones((n, hd)), "k_norm": jnp.ones((n, hd))}
        if sparse:
            mlp = {
                "gate": matrix(n, config.num_experts, d),
                "experts": feed_forward(config.expert_size, n, config.num_experts),
            }
        else:
            mlp = feed_forward(config.intermediate_size, n)
        layers.append(
            {
                "input_layernorm": jnp.ones((n, d)),
                "post_attention_layernorm": jnp.ones((n, d)),
                "self_attn": attention,
                "mlp": mlp,
            }
        )
    weights = {
        "embed_tokens": matrix(config.vocab_size, d),
        "layers": layers,
        "norm": jnp.ones(d),
    }
    if not config.tie_word_embeddings:
        weights["lm_head"] = matrix(config.vocab_size, d)
    return weights


def freeze(weights: dict, group_size: int = 32, bits: int = 4, dense_bits: int = 16) -> dict:
    """The base that a tree of float weights becomes: experts in low bits, the rest in bf16.

    With `dense_bits` 4 or 8 the other linear layers are quantised too; router, norms, embedding
    and head never are.
    """

    def weight(name: str, w: jax.Array, bits: int):
        if name.endswith("norm"):
            return w.astype(jnp.bfloat16)
        if bits < 16 and name.endswith("_proj"):
            return quantize(w, bits, group_size)
        return from_float(w.astype(jnp.bfloat16))

    def walk(tree: dict, bits_here: int) -> dict:
        out = {}
        for name, node in tree.items():
            if isinstance(node, dict):
                out[name] = walk(node, bits if name == "experts" else bits_here)
            else:
                out[name] = weight(name, node, bits_here)
        return out

    top = {k: weight(k, v, 16) for k, v in weights.items() if k != "layers"}
    return {**top, "layers": [walk(stack, dense_bits) for stack in weights["layers"]]}
