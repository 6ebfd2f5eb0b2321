"""The only forward pass in the project: sampler, trainer, reference, critic and gate all call it.

`apply` turns a flat stream of tokens into hidden states; `head.py` turns those into log-probs.
The residual stream is f32, and what a dense layer adds to it is not rounded before: against an f32
model that leaves two thirds of the error of a bf16 stream, for two more bytes an element.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model import grouped, latent
from orbit_jax.model.attention import Cache, Scoring, attend, attend_cached, by_slot, write
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.layers import Module, feed_forward, rms_norm
from orbit_jax.model.moe import moe
from orbit_jax.model.rope import angles
from orbit_jax.model.stream import Layout, Stream, lay_out
from orbit_jax.quant.matmul import over_rows
from orbit_jax.quant.qtensor import QTensor, dequantize, take_rows


def apply(
    config: ModelConfig,
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None, jax.Array]:
    """Runs the model over a stream of N tokens.

    Args:
      config: static.
      base: the frozen weights (see `checkpoint/huggingface.py` for the tree).
      adapter: None is the base itself.
      stream: tokens with rows and positions; with more than one data shard, shard i of the stream
        holds only rows of shard i.
      cache: keys and values of earlier tokens, extended in place; None in training, where the
        stream holds whole rows.

    Returns:
      hidden `[N, D]` after the final norm, in the compute dtype; the cache; and the number of
      tokens that chose each expert, `[sparse layers, E]` int32.
    """
    forward = functools.partial(_forward, config)
    if config.mesh.size > 1:
        caches, rows = mesh.cache_specs(config, cache), mesh.row_specs(stream)
        specs = (mesh.base_specs(base), mesh.adapter_specs(adapter), rows, caches)
        forward = mesh.per_device(forward, config, specs, (P("data"), caches, P()))
    return forward(base, adapter, stream, cache)


def _forward(
    config: ModelConfig,
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None, jax.Array]:
    """`apply` on one device, or on one device's part inside `shard_map`."""
    if config.mesh.size > 1:
        stream = mesh.local_stream(config.mesh, stream)
    dtype = jnp.dtype(config.compute_dtype)
    kv_heads = config.num_kv_heads // (config.mesh.tensor if mesh.shards_heads(config) else 1)
    layout = lay_out(config, stream, kv_heads)
    tables = angles(config.rope, config.rotated, stream.num_slots)
    rope = tuple(jnp.take(jnp.asarray(t), stream.positions, axis=0) for t in tables)
    hidden = _embed(base["embed_tokens"], stream.tokens)
    loads, first = [], 0
    for i, (sparse, count) in enumerate(config.stacks):
        # The stack is closed over and indexed by layer, not scanned: a scan would copy each layer's
        # packed weights out of it, all experts included.
        body = functools.partial(
            _layer, config, base["layers"][i], sparse, stream, layout, rope, first
        )
        body = jax.checkpoint(body, prevent_cse=False) if config.remat else body
        params = adapter.replace(params=adapter.params["layers"][i]) if adapter else None
        (hidden, cache), load = lax.scan(body, (hidden, cache), (jnp.arange(count), params))
        first += count
        if sparse:
            loads.append(load)
    hidden = over_rows(
        lambda h: rms_norm(h, base["norm"], config.rms_norm_eps, dtype), config.tile, hidden
    )
    load = jnp.concatenate(loads) if loads else jnp.zeros((0, 0), jnp.int32)
    return hidden, cache, load


def _layer(
    config: ModelConfig,
    weights: dict,
    sparse: bool,
    stream: Stream,
    layout: Layout,
    rope: tuple[jax.Array, jax.Array],
    first: int,
    carry: tuple[jax.Array, Cache | None],
    xs: tuple[jax.Array, Adapter | None],
) -> tuple[tuple[jax.Array, Cache | None], jax.Array]:
    """One layer as a scan body; `first` is the number of layers before this stack."""
    (hidden, cache), (layer, adapter) = carry, xs
    block = Module(config, weights, layer, adapter)
    attention, mlp = block.below("self_attn"), block.below("mlp")
    dtype = jnp.dtype(config.compute_dtype)

    def before_attention(hidden: jax.Array, cos: jax.Array, sin: jax.Array):
        x = block.norm("input_layernorm", hidden, dtype)
        if config.latent:
            return latent.queries_and_latents(attention, x, cos, sin)
        return grouped.queries_keys_values(attention, x, cos, sin)

    def after_attention(hidden: jax.Array, attended: jax.Array):
        attended = latent.values(attention, attended) if config.latent else attended
        hidden = hidden + attention.project("o_proj", attended, dtype=jnp.float32)
        return hidden, block.norm("post_attention_layernorm", hidden, dtype)

    q, k, v = over_rows(before_attention, config.tile, hidden, *rope)
    scoring = Scoring(
        scale=config.score_scale,
        window=_window(config, first + layer),
        sinks=grouped.sinks(attention),
    )
    if cache is None:
        keys = by_slot(layout, stream, k)
        values = keys if v is None else by_slot(layout, stream, v)
        attended = attend(config, layout, scoring, q, keys, values)
    else:
        cache = write(cache, first + layer, stream, k, v)
        attended = attend_cached(config, layout, scoring, q, cache, first + layer)
    if mesh.shards_heads(config):
        attended = mesh.gather_columns(config.mesh, attended)
    hidden, x = over_rows(after_attention, config.tile, hidden, attended)
    if not sparse:
        y = over_rows(lambda x: feed_forward(mlp, x, jnp.float32), config.tile, x)
        return (hidden + y, cache), jnp.zeros(0, jnp.int32)
    y, load = moe(mlp, x, stream.valid, skip_unused=cache is not None)
    if config.shared_size:
        shared = mlp.below("shared_experts")
        hidden += over_rows(lambda x: feed_forward(shared, x, jnp.float32), config.tile, x)
    return (hidden + y, cache), load


def _window(config: ModelConfig, layer: jax.Array) -> jax.Array | None:
    """How many positions a layer looks back over; None where no layer is limited."""
    if not config.windows:
        return None
    unlimited = config.max_positions
    return jnp.array([window or unlimited for window in config.windows], jnp.int32)[layer]


def _embed(table: QTensor | jax.Array, tokens: jax.Array) -> jax.Array:
    if isinstance(table, QTensor):
        return dequantize(take_rows(table, tokens), jnp.float32)
    return jnp.take(table, tokens, axis=0).astype(jnp.float32)
