"""Devices, axes and the rules that place every array; the same programs run on one device or eight.

Axes are `data` and `tensor`. Rows lie over `data`; dense weights over `tensor` on their output
dimension, with activations gathered, which keeps the numbers of one device; experts over both. So
do the rows of the cache, and what the optimiser holds of an adapter. Sampler and trainer share
these rules, so nothing is resharded between them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from orbit_jax import processes
from orbit_jax.adapters.adapter import Adapter, Method, is_named
from orbit_jax.exchange import as_axes
from orbit_jax.model.attention import Cache
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.quant.qtensor import QTensor, Unstacked

P = PartitionSpec
DEVICES = ("data", "tensor")

# Where a weight of the base lies, by the last names of its path. The first rule that names it
# counts. Biases follow the outputs of their weights, adapters their weights.
_VOCABULARY, _OUTPUTS, _EXPERTS = P("tensor", None), P(None, "tensor", None), P(None, DEVICES)
RULES: tuple[tuple[tuple[str, ...], P], ...] = (
    (("embed_tokens", "lm_head"), _VOCABULARY),
    (("experts.gate_proj", "experts.up_proj", "experts.down_proj"), P(*_EXPERTS, None, None)),
    (("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_b_proj"), _OUTPUTS),
    (("gate_proj", "up_proj", "down_proj", "gate"), _OUTPUTS),
    # Narrow: a part of it would not hold whole blocks of scales.
    (("kv_a_proj_with_mqa",), P(None, None, None)),
    (("norm", "input_layernorm", "post_attention_layernorm"), P()),
    (("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"), P()),
    (("gate_bias", "e_score_correction_bias", "sinks"), P()),
)
_TOKENS = 16  # streams are multiples of it, see rl/packing.py
_FIELDS = tuple(field.name for field in dataclasses.fields(QTensor))


@functools.cache
def build(shape: MeshShape, devices: tuple[jax.Device, ...] | None = None) -> Mesh:
    """The mesh over the first `shape.size` devices, by default of this machine.

    Raises:
      ValueError: if there are fewer devices, or several processes have others.
    """
    devices = devices or jax.devices()
    if jax.process_count() > 1 and len(devices) != shape.size:
        raise ValueError(
            f"mesh={shape.data}x{shape.tensor} is of {shape.size} devices, the "
            f"{jax.process_count()} processes see {len(devices)} together, "
            f"{jax.local_device_count()} here: set mesh.data and mesh.tensor to use each of them, "
            "or JAX_LOCAL_DEVICE_IDS to those that each process shall have"
        )
    if len(devices) < shape.size:
        raise ValueError(
            f"mesh={shape.data}x{shape.tensor} needs {shape.size} devices, this machine has "
            f"{len(devices)}: set mesh.data and mesh.tensor to 1, or simulate devices with "
            f"--config.mesh.simulate"
        )
    grid = np.array(devices[: shape.size]).reshape(shape.data, shape.tensor)
    return Mesh(grid, DEVICES)


def _abstract(shape: MeshShape) -> AbstractMesh:
    """What a program needs to know of a mesh: it is compiled for devices elsewhere as well."""
    return AbstractMesh((shape.data, shape.tensor), DEVICES)


def validate(config: ModelConfig) -> None:
    """Refuses a mesh that does not divide what it must shard."""
    shape = config.mesh
    widths = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    heads, latent = config.num_heads, config.latent
    if latent:
        widths["q_lora_rank"] = latent.q_rank
        widths["num_attention_heads"] = heads
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
    if _TOKENS % shape.tensor:
        raise ValueError(
            f"mesh.tensor={shape.tensor} does not divide {_TOKENS}, the tokens that are taken "
            "together: use a power of two up to it"
        )
    if any(config.sparse) and config.num_experts % shape.size:
        raise ValueError(
            f"mesh={shape.data}x{shape.tensor} does not divide num_experts={config.num_experts}"
        )


def weight_spec(path: tuple[str, ...]) -> P:
    """Where a weight `[..., out, in]` (or a norm) of the base lies, by its module path.

    Raises:
      ValueError: for a path that no rule matches.
    """
    for names, spec in RULES:
        if any(is_named(name, path) for name in names):
            return spec
    name = path[-1]
    if name.endswith("_bias"):
        return P(*weight_spec((*path[:-1], name.removesuffix("_bias")))[:-1])
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
    """Where a layer reads an adapter's parameters: where their weights lie."""
    if adapter is None:
        return None

    def one(path: tuple[str, ...], method: Method, params: dict) -> dict:
        specs = method.partition(weight_spec(path))
        return {name: specs[name] for name in params}

    return adapter.each(one)


def stored_specs(shape: MeshShape, adapter: Adapter | None) -> Adapter | None:
    """Where an adapter is kept, with its moments: also over the axes that `adapter_specs` leaves.

    Nothing that is trained lies on two devices (ZeRO, Rajbhandari et al., 2020), unless it does not
    divide. In training a layer gathers what it reads, a sampler does so once.
    """

    def spread(spec: P, leaf: jax.Array) -> P:
        parts = [as_axes(axes) for axes in itertools.chain(spec, [None] * (leaf.ndim - len(spec)))]
        for axis in (axis for axis in DEVICES if axis not in sum(parts, ())):
            cut = [math.prod(getattr(shape, a) for a in axes) for axes in parts]
            held = [n // parts_of for n, parts_of in zip(leaf.shape, cut, strict=True)]
            fits = [i for i, n in enumerate(held) if i and n % getattr(shape, axis) == 0]
            if fits:
                widest = max(fits, key=held.__getitem__)
                parts[widest] = (*parts[widest], axis)
        return P(*(axes or None for axes in parts))

    specs = adapter_specs(adapter)
    return jax.tree.map(spread, specs, adapter, is_leaf=lambda x: isinstance(x, P))


@jax.named_scope("adapter")
def gathered(config: ModelConfig, adapter: Adapter, dtype: jnp.dtype) -> Adapter:
    """Inside a jit: an adapter as layers read it in `dtype`, out of the parts that are stored."""
    # Without the first constraint it would be gathered in f32, and cast then.
    parts = constrain(config, adapter.cast(dtype), stored_specs(config.mesh, adapter))
    whole = constrain(config, parts, adapter_specs(adapter))

    def ready(whole: Adapter) -> Adapter:
        # Layer by layer, in the shapes of training: equal bits may depend on them.
        return whole.prepared(over=lax.map).cast(dtype)

    if config.mesh.size > 1:
        after = adapter_specs(jax.eval_shape(ready, whole))
        ready = per_device(ready, config, (adapter_specs(whole),), after)
    return ready(whole)


def cache_specs(cache: Cache | None) -> Cache | None:
    """Of keys and values `[L, B, S, K, hd]`: each device attends for rows of its own."""
    return jax.tree.map(lambda _: P(None, DEVICES), cache)


def row_specs(tree):
    """Of arrays whose first dimension is rows, or a stream of them."""
    return jax.tree.map(lambda _: P("data"), tree)


def micro_batch_specs(tree):
    """Of arrays `[M, rows or tokens]`, and of scalars."""
    return jax.tree.map(lambda x: P(None, "data") if x.ndim else P(), tree)


def place(config: ModelConfig, tree, specs):
    """Puts a tree of arrays on the mesh (or on the one device)."""
    if config.mesh.size == 1:
        # Named: an array that may be moved is another signature to jit than one that may not.
        return jax.device_put(tree, jax.devices()[0])
    mesh = build(config.mesh)
    return jax.tree.map(lambda x, s: processes.put(x, named(mesh, s)), tree, specs)


def named(mesh: Mesh | AbstractMesh, spec: P) -> NamedSharding:
    """A spec on a mesh, spelt as jit spells that of a result.

    The same layout spelt otherwise is another signature to jit: what a step returned would be
    compiled for once more.
    """
    parts = [tuple(axis for axis in as_axes(axes) if mesh.shape[axis] > 1) for axes in spec]
    while parts and not parts[-1]:
        parts.pop()
    return NamedSharding(mesh, P(*(p[0] if len(p) == 1 else p or None for p in parts)))


def weight_sharding(
    config: ModelConfig,
    path: str,
    shape: tuple[int, ...],
    devices: tuple[jax.Device, ...] | None = None,
) -> Sharding:
    """Where one array of the base lies: the `sharding` of a `Placement` of `load_base`.

    `path` is such as `norm` or `layers.0.self_attn.q_proj.codes`; devices are as in `build`.

    Raises:
      ValueError: if the mesh does not divide the array.
    """
    if config.mesh.size == 1:
        # Named: an array that may be moved is another signature to jit than one that may not.
        return SingleDeviceSharding((devices or jax.devices())[0])
    mesh = build(config.mesh, devices)
    names = tuple(name for name in path.split(".") if name not in _FIELDS)
    spec = field_spec(weight_spec(names), shape)
    for size, axes in zip(shape, spec, strict=False):
        parts = math.prod(mesh.shape[axis] for axis in as_axes(axes))
        if size % parts:
            raise ValueError(
                f"mesh={config.mesh.data}x{config.mesh.tensor} does not divide {path} of shape "
                f"{list(shape)}: choose a mesh whose axes divide {size}"
            )
    return named(mesh, spec)


def field_spec(spec: P, shape: tuple[int, ...]) -> P:
    """A weight's spec for one of its fields: what all rows share, each device has."""
    return P(*(None if n == 1 else axes for n, axes in zip(shape, spec, strict=False)))


def constrain(config: ModelConfig, tree, specs):
    """Inside a jit: results lie as arguments do, so that the next call retraces nothing."""
    if config.mesh.size == 1:
        return tree
    mesh = _abstract(config.mesh)
    return jax.tree.map(lambda x, s: lax.with_sharding_constraint(x, named(mesh, s)), tree, specs)


def per_device(fn: Callable, config: ModelConfig, in_specs, out_specs) -> Callable:
    """`fn` with each device running it on its own part of the arguments."""
    mesh = _abstract(config.mesh)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def place_rows(config: ModelConfig, tree):
    """Puts host arrays whose first dimension is rows (or a stream of them) over `data`."""
    if config.mesh.size == 1:
        return tree
    return place(config, tree, row_specs(tree))


def place_micro_batches(config: ModelConfig, tree):
    """Puts host arrays `[M, rows or tokens]` with their second dimension over `data`."""
    return tree if config.mesh.size == 1 else place(config, tree, micro_batch_specs(tree))
