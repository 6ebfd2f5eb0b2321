"""The only forward pass in the project: sampler, trainer, reference, critic and gate all call it.

`apply` turns a flat stream of tokens into hidden states; `head.py` turns those into log-probs.
The residual stream is f32, and what a dense layer adds to it is not rounded before: against an f32
model that leaves two thirds of the error of a bf16 stream, for two more bytes an element.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from orbit_jax import exchange, mesh
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
      adapter: None is the base itself. On a mesh as `mesh.adapter_specs` says, or without a cache,
        in training, in the parts that are stored. Each layer prepares its own part unless that was
        done before.
      stream: tokens with rows and positions; with more than one data shard, part i of the stream
        holds only rows of shard i, and with a cache only those of device i.
      cache: keys and values of earlier tokens, extended in place; None in training, where the
        stream holds whole rows.

    Returns:
      hidden `[N, D]` after the final norm, in the compute dtype; the cache; and the number of
      tokens that chose each expert, `[sparse layers, E]` int32.
    """
    read = mesh.adapter_specs(adapter)
    held = mesh.stored_specs(config.mesh, adapter) if cache is None else read
    forward = functools.partial(_forward, config, (held, read))
    if config.mesh.size > 1:
        caches, rows = mesh.cache_specs(cache), mesh.row_specs(stream)
        specs = (mesh.base_specs(base), held, rows, caches)
        forward = mesh.per_device(forward, config, specs, (P("data"), caches, P()))
    return forward(base, adapter, stream, cache)


def _forward(
    config: ModelConfig,
    placed: tuple[Adapter | None, Adapter | None],
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None, jax.Array]:
    """`apply` on one device, or on one device's part inside `shard_map`.

    `placed` are the partition specs of the adapter as it comes and as layers read it.
    """
    shape, dtype = config.mesh, jnp.dtype(config.compute_dtype)
    stream = exchange.local_stream(shape, stream)
    # A device attends from its part of the tokens: over keys of its own rows where they are cached,
    # in training over those of all of them.
    keyed = stream if cache is None else exchange.own_rows_stream(shape, stream)
    queries = exchange.own_tokens_stream(shape, stream) if cache is None else keyed
    layout = lay_out(config, keyed, queries)
    tables = angles(config.rope, config.rotated, stream.num_slots)
    rope = tuple(jnp.take(jnp.asarray(t), stream.positions, axis=0) for t in tables)
    hidden = _embed(config, base["embed_tokens"], stream.tokens)
    loads, first = [], 0
    for i, (sparse, count) in enumerate(config.stacks):
        # The stack is closed over and indexed by layer, not scanned: a scan would copy each layer's
        # packed weights out of it, all experts included.
        of_stack, *specs = (
            tree and tree.replace(params=tree.params["layers"][i]) for tree in (adapter, *placed)
        )
        body = functools.partial(
            _layer, config, base["layers"][i], sparse, specs, stream, keyed, layout, rope, first
        )
        body = jax.checkpoint(body, prevent_cse=False) if config.remat else body
        (hidden, cache), load = lax.scan(body, (hidden, cache), (jnp.arange(count), of_stack))
        first += count
        if sparse:
            loads.append(load)

    hidden = over_rows(
        lambda h: rms_norm(h, base["norm"], config.rms_norm_eps, dtype), config.tile, hidden
    )
    hidden = exchange.gather_tokens(shape, hidden)
    load = jnp.concatenate(loads) if loads else jnp.zeros((0, 0), jnp.int32)
    return hidden, cache, load


def _layer(
    config: ModelConfig,
    weights: dict,
    sparse: bool,
    specs: Sequence[Adapter | None],
    stream: Stream,
    keyed: Stream,
    layout: Layout,
    rope: tuple[jax.Array, jax.Array],
    first: int,
    carry: tuple[jax.Array, Cache | None],
    xs: tuple[jax.Array, Adapter | None],
) -> tuple[tuple[jax.Array, Cache | None], jax.Array]:
    """One layer as a scan body.

    `first` is the number of layers before this stack, `keyed` the tokens whose keys and values this
    device attends over. Of the residual stream, a device of a mesh has its own tokens.
    """
    (hidden, cache), (layer, adapter), shape = carry, xs, config.mesh
    if adapter is not None and shape.size > 1:
        adapter = exchange.gather_adapter(adapter, *specs)
    adapter = adapter and adapter.prepared()
    block = Module(config, weights, layer, adapter)
    attention, mlp = block.below("self_attn"), block.below("mlp")
    dtype = jnp.dtype(config.compute_dtype)

    def normed(name: str, hidden: jax.Array) -> jax.Array:
        x = over_rows(lambda h: block.norm(name, h, dtype), config.tile, hidden)
        return exchange.gather_tokens(shape, x)

    def added(hidden: jax.Array, part: Callable, *inputs: jax.Array) -> jax.Array:
        out = over_rows(part, config.tile, *inputs)
        return hidden + exchange.columns_to_tokens(shape, out)

    def before_attention(x: jax.Array, cos: jax.Array, sin: jax.Array):
        if config.latent:
            return latent.queries_and_latents(attention, x, cos, sin)
        return grouped.queries_keys_values(attention, x, cos, sin)

    def after_attention(attended: jax.Array) -> jax.Array:
        if config.latent:
            attended = exchange.gather_columns(shape, latent.values(attention, attended))
        return attention.project("o_proj", attended, gather=False, dtype=jnp.float32)

    x = normed("input_layernorm", hidden)
    q, k, v = over_rows(before_attention, config.tile, x, *rope)
    to_own_tokens = exchange.heads_to_tokens if config.own_heads else exchange.own_tokens
    q = to_own_tokens(shape, q)
    scoring = Scoring(
        scale=config.score_scale,
        window=_window(config, first + layer),
        sinks=grouped.sinks(attention),
    )
    if cache is None:
        keys = by_slot(layout, keyed, k)
        values = keys if v is None else by_slot(layout, keyed, v)
        attended = attend(config, layout, scoring, q, keys, values)
    else:
        k, v = jax.tree.map(lambda x: exchange.own_tokens(shape, x), (k, v))
        cache = write(cache, first + layer, keyed, k, v)
        attended = attend_cached(config, layout, scoring, q, cache, first + layer)
    if config.latent:
        attended = attended.reshape(-1, config.num_heads, config.head_dim)
        attended = exchange.tokens_to_heads(shape, attended)
    else:
        attended = exchange.gather_tokens(shape, attended)
    hidden = added(hidden, after_attention, attended)
    x = normed("post_attention_layernorm", hidden)
    if not sparse:
        hidden = added(hidden, lambda x: feed_forward(mlp, x, jnp.float32), x)
        return (hidden, cache), jnp.zeros(0, jnp.int32)
    y, load = moe(mlp, x, stream.valid)
    if config.shared_size:
        shared = mlp.below("shared_experts")
        hidden = added(hidden, lambda x: feed_forward(shared, x, jnp.float32), x)
    return (hidden + y, cache), load


def _window(config: ModelConfig, layer: jax.Array) -> jax.Array | None:
    """How many positions a layer looks back over; None where no layer is limited."""
    if not config.windows:
        return None
    unlimited = config.max_positions
    return jnp.array([window or unlimited for window in config.windows], jnp.int32)[layer]


def _embed(config: ModelConfig, table: QTensor | jax.Array, tokens: jax.Array) -> jax.Array:
    """Embeddings `[N, D]` in f32; on a mesh of own tokens, out of the words of each device."""

    def rows(tokens: jax.Array) -> jax.Array:
        if isinstance(table, QTensor):
            return dequantize(take_rows(table, tokens), jnp.float32)
        return jnp.take(table, tokens, axis=0).astype(jnp.float32)

    if config.mesh.tensor == 1:
        return rows(tokens)
    words = config.vocab_size // config.mesh.tensor
    tokens = tokens - lax.axis_index("tensor") * words
    held = (tokens >= 0) & (tokens < words)
    x = jnp.where(held[:, None], rows(jnp.where(held, tokens, 0)), 0.0)
    return exchange.pick_own_tokens(config.mesh, x)
