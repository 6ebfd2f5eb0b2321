"""What an adapter is, and where it attaches.

A method (`LoRA`, a rotation, yours) is a small frozen record of pure functions over the parameters
at ONE weight. The model knows only `input_side` and `output_side`; neither `quant/` nor `model/`
changes for a new method. The parameters form a tree shaped like the base, with leaves only where
the targets say.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

Params = dict[str, jax.Array]

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@runtime_checkable
class Method(Protocol):
    """Pure functions over the parameters at one weight `[..., out, in]`. Hashable by value."""

    def init(self, key: jax.Array, shape: tuple[int, ...]) -> Params:
        """f32 parameters for a weight of that shape; the adapted weight must equal the base's."""
        ...

    def input_side(self, params: Params, x: jax.Array) -> jax.Array:
        """What happens to `x[N, in]` before the frozen matmul."""
        ...

    def output_side(self, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        """What happens to the matmul's f32 result `y[N, out]`; `x` is the untouched input."""
        ...

    def merge(self, params: Params, w: jax.Array) -> jax.Array:
        """The weight `[..., out, in]` in f32 with the adapter folded in."""
        ...

    def count(self, shape: tuple[int, ...]) -> int:
        """Number of trainable parameters for a weight of that shape."""
        ...

    def partition(self, spec: PartitionSpec) -> dict[str, PartitionSpec]:
        """How the parameters are sharded when the weight is sharded by `spec`."""
        ...


@struct.dataclass
class Adapter:
    """Parameters and the method that reads them.

    Attributes:
      params: `{"layers": [stack, ...]}` like the base's, with method parameters at adapted weights.
      method: static.
    """

    params: dict
    method: Method = struct.field(pytree_node=False)

    def cast(self, dtype: jnp.dtype) -> "Adapter":
        """The copy that the forward pass sees, made once for a whole decoding loop."""
        return self.replace(params=jax.tree.map(lambda p: p.astype(dtype), self.params))


def attach(
    method: Method, key: jax.Array, base: dict, targets: tuple[str, ...] = LINEAR_LAYERS
) -> Adapter:
    """Creates an adapter on every weight of `base` whose module name ends in a target.

    A target is matched by whole name components, never by substring: `gate_proj` matches
    `mlp.gate_proj` and `mlp.experts.gate_proj`, `experts.gate_proj` only the latter.

    Raises:
      ValueError: for no target at all, one that matches no weight, or one that names the router.
    """
    if not targets:
        raise ValueError("adapter.targets is empty: name at least one linear layer")
    unused = set(targets)

    def walk(tree: dict, path: tuple[str, ...]) -> dict:
        out = {}
        for name, node in tree.items():
            here = (*path, name)
            if isinstance(node, dict):
                if below := walk(node, here):
                    out[name] = below
                continue
            hits = {t for t in targets if here[-len(t.split(".")) :] == tuple(t.split("."))}
            if hits and name == "gate":
                raise ValueError(
                    f"adapter.targets={sorted(hits)} names the router {'.'.join(here)}: "
                    "a router is never adapted, its load would drift; remove it"
                )
            if hits and name not in LINEAR_LAYERS:
                raise ValueError(
                    f"adapter.targets={sorted(hits)} names {'.'.join(here)}, which is not one of "
                    f"the linear layers {LINEAR_LAYERS}"
                )
            if hits:
                unused.difference_update(hits)
                nonlocal key
                key, here_key = jax.random.split(key)
                out[name] = method.init(here_key, node.shape)
        return out

    params = {"layers": [walk(stack, ()) for stack in base["layers"]]}
    if unused:
        raise ValueError(
            f"adapter.targets: {sorted(unused)} match no weight of this base; the linear layers "
            f"are {LINEAR_LAYERS}"
        )
    return Adapter(params=params, method=method)


def at(params: dict | None, *names: str) -> dict | None:
    """The parameters below a module name, or None where nothing is attached."""
    for name in names:
        params = params.get(name) if params else None
    return params


def merge(adapter: Adapter, weights: dict) -> dict:
    """Folds the adapter into a tree of f32 weights that is shaped like the base."""

    def walk(params: dict, tree: dict) -> dict:
        merged = dict(tree)
        for name, below in params.items():
            if isinstance(tree[name], dict):
                merged[name] = walk(below, tree[name])
            else:
                merged[name] = adapter.method.merge(below, tree[name])
        return merged

    layers = [walk(p, w) for p, w in zip(adapter.params["layers"], weights["layers"], strict=True)]
    return {**weights, "layers": layers}


def fingerprint(tree: dict) -> jax.Array:
    """A uint32 checksum of a tree of f32 arrays: which adapter produced a rollout.

    Each element's bits are mixed with its place, so that any changed bit and any swap shows. Exact
    for any sharding (integer sums wrap the same in any order).
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        place = jax.lax.iota(jnp.uint32, leaf.size).reshape(leaf.shape)
        total = _mix(total + jnp.sum(_mix(bits + _mix(place)), dtype=jnp.uint32))
    return total


def _mix(x: jax.Array) -> jax.Array:
    """A one-to-one scrambling of uint32 (the finaliser of MurmurHash3; 0 stays 0)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
