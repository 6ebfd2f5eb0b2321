"""Random weights of a model, and freezing a trained tree of floats into the packed base."""

import math

import jax
import jax.numpy as jnp

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.weights import Weight, weights
from orbit_jax.quant.qtensor import QTensor, from_float
from orbit_jax.quant.quantize import quantize


def init_weights(config: ModelConfig, key: jax.Array, scale: float = 1.0) -> dict:
    """A tree of f32 arrays shaped like the base: matrices normal with deviation scale/sqrt(in).

    Norms are ones, biases and the like zeros.
    """
    tree = weights(config)
    keys = iter(jax.random.split(key, len(jax.tree.leaves(tree))))

    def draw(path: tuple, weight: Weight) -> jax.Array:
        shape, key = (*weight.lead, *weight.shape), next(keys)
        if weight.kind != "Vector":
            return jax.random.normal(key, shape) * scale / math.sqrt(shape[-1])
        return jnp.ones(shape) if path[-1].key.endswith("norm") else jnp.zeros(shape)

    return jax.tree_util.tree_map_with_path(draw, tree)


def freeze(
    config: ModelConfig, trained: dict, group_size: int = 32, bits: int = 4, dense_bits: int = 16
) -> dict:
    """The base that a tree of float weights becomes: experts in low bits, the rest in bf16.

    With `dense_bits` 4 or 8 the other linear layers are quantised too; router, vectors, embedding
    and head never are.
    """

    def freeze_one(path: tuple, weight: Weight, w: jax.Array) -> QTensor | jax.Array:
        names = [getattr(key, "key", None) for key in path]
        bits_here = bits if "experts" in names else dense_bits
        if weight.kind == "Vector":
            return w.astype(jnp.bfloat16)
        if weight.kind == "Linear" and weight.lead and bits_here < 16:
            return quantize(w, bits_here, group_size)
        return from_float(w.astype(jnp.bfloat16))

    return jax.tree_util.tree_map_with_path(freeze_one, weights(config), trained)
