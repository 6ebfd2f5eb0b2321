"""Devices, axes and the rules that place every array; the same programs run on one device or eight.

Axes are `data` and `tensor`. Rows lie over `data`; dense weights over `tensor` on their output
dimension, with activations gathered, which keeps the numbers of one device; experts over both.
Sampler and trainer share these rules, so nothing is resharded between them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from orbit_jax.adapters.adapter import LINEAR_LAYERS, Adapter
from orbit_jax.model.attention import Cache
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.quant.qtensor import QTensor, Unstacked

P = PartitionSpec
_REPLICATED = ("embed_tokens", "lm_head", "norm", "gate", "q_norm", "k_norm")
_VECTORS = ("gate_bias", "e_score_correction_bias", "sinks", "q_a_layernorm", "kv_a_layernorm")
_FIELDS = tuple(field.name for field in dataclasses.fields(QTensor))
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@functools.cache
def build(shape: MeshShape) -> Mesh:
    """The mesh over the first `shape.size` devices.

    Raises:
      ValueError: if there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < shape.size:
        raise ValueError(
            f"mesh={shape.data}x{shape.tensor} needs {shape.size} devices, this machine has "
            f"{len(devices)}: set mesh.data and mesh.tensor to 1, or simulate devices with "
            f"--config.mesh.simulate"
        )
    grid = np.array(devices[: shape.size]).reshape(shape.data, shape.tensor)
    return Mesh(grid, ("data", "tensor"))


def validate(config: ModelConfig) -> None:
    """Refuses a mesh that does not divide what it must shard."""
    shape = config.mesh
    widths = {
        "hidden_size": config.hidden_size,
    }
    heads, latent = config.num_heads, config.latent
    if latent:
        widths["q_lora_rank"] = latent.q_rank
        widths["kv_lora_rank + qk_rope_head_dim"] = config.head_dim
        widths["num_heads * qk_head_dim"] = heads * (latent.nope + latent.rope)
    else:
        widths["num_heads * head_dim"] = heads * config.head_dim
        widths["num_kv_heads * head_dim"] = config.num_kv_heads * config.head_dim
    if config.shared_size:
        widths["n_shared_experts * moe_intermediate_size"] = config.shared_size
    if not all(config.sparse):
        widths["intermediate_size"] = config.intermediate_size
    for name, width in widths.items():
        if width % shape.tensor:
            raise ValueError(f"mesh.tensor={shape.tensor} does not divide {name}={width}")
    if any(config.sparse) and config.num_experts % shape.size:
        raise ValueError(
            f"mesh={shape.data}x{shape.tensor} does not divide num_experts={config.num_experts}"
        )


def weight_spec(path: tuple[str, ...]) -> P:
    """Where a weight `[..., out, in]` (or a norm) of the base lies, by its module path.

    Raises:
      ValueError: for a path that no rule matches.
    """
    name = path[-1]
    if name in (*_REPLICATED, *_VECTORS, *_LAYER_NORMS):
        return P()
    if name.removesuffix("_bias") != name:
        return P(*weight_spec((*path[:-1], name.removesuffix("_bias")))[:-1])
    if name == "kv_b_proj":
        return P(None, None, None)  # each device attends with all heads to the one latent
    if name in LINEAR_LAYERS and "experts" in path:
        return P(None, ("data", "tensor"), None, None)
    if name in LINEAR_LAYERS:
        return P(None, "tensor", None)
    raise ValueError(f"mesh: no partition rule matches the weight {'.'.join(path)}")


def base_specs(base: dict) -> dict:
    """Partition specs with the structure of `base`; a QTensor's fields share its weight's spec."""

    def leaf(path: tuple, node: QTensor | Unstacked | jax.Array) -> QTensor | Unstacked | P:
        names = tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
        spec = weight_spec(names)
        if isinstance(node, Unstacked):
            spec = P(*spec[1:])
        return jax.tree.map(lambda field: field_spec(spec, field.shape), node)

    is_weight = lambda node: isinstance(node, QTensor | Unstacked)  # noqa: E731
    return jax.tree_util.tree_map_with_path(leaf, base, is_leaf=is_weight)


def adapter_specs(adapter: Adapter | None) -> Adapter | None:
    """An adapter's parameters lie where their weights lie."""
    if adapter is None:
        return None

    def walk(tree: dict, path: tuple[str, ...]) -> dict:
        if path and path[-1] in LINEAR_LAYERS:
            return adapter.method_at(*path).partition(weight_spec(path))
        return {name: walk(below, (*path, name)) for name, below in tree.items()}

    return adapter.replace(params={"layers": [walk(s, ()) for s in adapter.params["layers"]]})


def shards_heads(config: ModelConfig) -> bool:
    """Whether key/value heads divide over `tensor`; otherwise every tensor rank has them all."""
    return config.mesh.tensor > 1 and config.num_kv_heads % config.mesh.tensor == 0


def cache_specs(config: ModelConfig, cache: Cache | None) -> Cache | None:
    """Of keys and values `[L, B, S, K, hd]`."""
    spec = P(None, "data", None, "tensor" if shards_heads(config) else None)
    return jax.tree.map(lambda _: spec, cache)


def row_specs(tree):
    """Of arrays whose first dimension is rows, or a stream of them."""
    return jax.tree.map(lambda _: P("data"), tree)


def place(config: ModelConfig, tree, specs):
    """Puts a tree of arrays on the mesh (or on the one device)."""
    if config.mesh.size == 1:
        # Named: an array that may be moved is another signature to jit than one that may not.
        return jax.device_put(tree, jax.devices()[0])
    mesh = build(config.mesh)
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def weight_sharding(config: ModelConfig, path: str, shape: tuple[int, ...]) -> Sharding:
    """Where one array of the base lies: the `sharding` of a `Placement` of `load_base`.

    `path` is such as `norm` or `layers.0.self_attn.q_proj.codes`.

    Raises:
      ValueError: if the mesh does not divide the array.
    """
    if config.mesh.size == 1:
        # Named: an array that may be moved is another signature to jit than one that may not.
        return SingleDeviceSharding(jax.devices()[0])
    mesh = build(config.mesh)
    names = tuple(name for name in path.split(".") if name not in _FIELDS)
    spec = field_spec(weight_spec(names), shape)
    for size, axes in zip(shape, spec, strict=False):
        parts = math.prod(mesh.shape[axis] for axis in _axes(axes))
        if size % parts:
            raise ValueError(
                f"mesh={config.mesh.data}x{config.mesh.tensor} does not divide {path} of shape "
                f"{list(shape)}: choose a mesh whose axes divide {size}"
            )
    return NamedSharding(mesh, spec)


def field_spec(spec: P, shape: tuple[int, ...]) -> P:
    """A weight's spec for one of its fields: what all rows share, each device has."""
    return P(*(None if n == 1 else axes for n, axes in zip(shape, spec, strict=False)))


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def constrain(config: ModelConfig, tree, specs):
    """Inside a jit: results lie as arguments do, so that the next call retraces nothing."""
    if config.mesh.size == 1:
        return tree
    mesh = build(config.mesh)
    return jax.tree.map(
        lambda x, s: lax.with_sharding_constraint(x, NamedSharding(mesh, s)), tree, specs
    )


def per_device(fn: Callable, config: ModelConfig, in_specs, out_specs) -> Callable:
    """`fn` with each device running it on its own part of the arguments."""
    mesh = build(config.mesh)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def local_stream(shape: MeshShape, stream: Stream) -> Stream:
    """Inside `shard_map`: this shard's tokens with rows counted from its first one."""
    rows = stream.num_rows // shape.data
    first = lax.axis_index("data") * rows
    local = stream.rows - first
    # Rows of other shards and padding become padding; a negative row must not wrap.
    local = jax.numpy.where((local >= 0) & (local < rows), local, rows)
    prefix = None if stream.prefix is None else stream.prefix - first
    return stream.replace(rows=local, num_rows=rows, prefix=prefix)


def gather_columns(shape: MeshShape, y: jax.Array) -> jax.Array:
    """Inside `shard_map`: the whole `[N, out]` from each device's columns."""
    return lax.all_gather(y, "tensor", axis=1, tiled=True) if shape.tensor > 1 else y


def own_columns(shape: MeshShape, y: jax.Array) -> jax.Array:
    """Inside `shard_map`: this device's part of the last dimension of a whole array."""
    width = y.shape[-1] // shape.tensor
    return lax.dynamic_slice_in_dim(y, lax.axis_index("tensor") * width, width, axis=-1)


def place_rows(config: ModelConfig, tree):
    """Puts host arrays whose first dimension is rows (or a stream of them) over `data`."""
    if config.mesh.size == 1:
        return tree
    return place(config, tree, row_specs(tree))


def place_micro_batches(config: ModelConfig, tree):
    """Puts host arrays `[M, rows or tokens]` with their second dimension over `data`."""
    if config.mesh.size == 1:
        return tree
    return place(config, tree, jax.tree.map(lambda x: P(None, "data") if x.ndim else P(), tree))
