"""What an adapter is, and where it attaches.

A method (`LoRA`, `OFT`, yours) is a small frozen record of pure functions over the parameters
at ONE weight. The model knows only `input_side` and `output_side`; neither `quant/` nor `model/`
changes for a new method. The parameters form a tree shaped like the base, with leaves only where
the targets say.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

Params = dict[str, jax.Array]

# Of all families; a base has some of them.
LINEAR_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@runtime_checkable
class Method(Protocol):
    """Pure functions over the parameters at one weight `[..., out, in]`. Hashable by value.

    Two more are there where a method needs them. `prepare(params)` turns what is stored into what
    `input_side` and `output_side` read, both in f32: a sampler does so once, training once a layer.
    `output_side_transposed(params, x, y)` is `output_side` of the transposed weight, for
    `kv_b_proj` (see `model/latent.py`).
    """

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
        """How parameters, stored and prepared, are sharded when the weight is by `spec`."""
        ...


@struct.dataclass
class Adapter:
    """Parameters and the methods that read them.

    Attributes:
      params: `{"layers": [stack, ...]}` like the base's, with method parameters at adapted weights;
        after `below`, only what lies there.
      method: static; of every weight that no override names.
      overrides: static; `(target, method)`, targets matched as those of `attach`; of several that
        match a weight the last one counts.
      path: static; the module path inside a layer that `params` is rooted at.
      ready: static; whether `params` are what layers read, not what is stored.
    """

    params: dict
    method: Method = struct.field(pytree_node=False)
    overrides: tuple[tuple[str, Method], ...] = struct.field(pytree_node=False, default=())
    path: tuple[str, ...] = struct.field(pytree_node=False, default=())
    ready: bool = struct.field(pytree_node=False, default=False)

    def below(self, *names: str) -> "Adapter | None":
        """The part under a module name, or None where nothing is attached."""
        params = at(self.params, *names)
        return self.replace(params=params, path=(*self.path, *names)) if params else None

    def method_at(self, *names: str) -> Method:
        """The method of the weight under `names`; without names, of the one at `path`."""
        return method_of((*self.path, *names), self.method, self.overrides)

    @property
    def methods(self) -> str:
        """In words what the parameters alone do not say: ranks, scales and exceptions."""
        return "; ".join([str(self.method), *(f"{name}: {m}" for name, m in self.overrides)])

    def each(self, fn: Callable[[tuple[str, ...], Method, Params], Params]) -> "Adapter":
        """`fn(module path, method, parameters)` in place of the parameters at each weight."""

        def walk(tree: dict | list, path: tuple[str, ...]) -> dict | list:
            if isinstance(tree, list):
                return [walk(stack, path) for stack in tree]
            if path and path[-1] in LINEAR_LAYERS:
                return fn(path, self.method_at(*path[len(self.path) :]), tree)
            return {name: walk(below, (*path, name)) for name, below in tree.items()}

        return self.replace(params=walk(self.params, self.path))

    def prepared(self, over: Callable = lambda prepare, params: prepare(params)) -> "Adapter":
        """What layers read of it, in f32; `over(prepare, params)` says how each is prepared."""
        if self.ready:
            return self

        def one(path: tuple[str, ...], method: Method, params: Params) -> Params:
            return over(method.prepare, params) if hasattr(method, "prepare") else params

        return self.each(one).replace(ready=True)

    def cast(self, dtype: jnp.dtype) -> "Adapter":
        """In the compute dtype, as a forward pass sees it; f32 where it is still to be prepared."""

        def one(path: tuple[str, ...], method: Method, params: Params) -> Params:
            waits = hasattr(method, "prepare") and not self.ready
            return params if waits else jax.tree.map(lambda p: p.astype(dtype), params)

        return self.each(one)


def method_of(
    path: tuple[str, ...], method: Method, overrides: tuple[tuple[str, Method], ...]
) -> Method:
    """The method of the weight at a module path: that of the last override that names it."""
    return next((m for target, m in reversed(overrides) if is_named(target, path)), method)


def attach(
    method: Method,
    key: jax.Array,
    base: dict,
    targets: tuple[str, ...] = LINEAR_LAYERS,
    overrides: tuple[tuple[str, Method], ...] = (),
) -> Adapter:
    """Creates an adapter on every weight of `base` whose module name ends in a target.

    A target is matched by whole name components, never by substring: `gate_proj` matches
    `mlp.gate_proj` and `mlp.experts.gate_proj`, `experts.gate_proj` only the latter. The default,
    `LINEAR_LAYERS`, means those of them that the base has.

    `overrides` gives some of the weights methods of their own, named as targets are.

    Raises:
      ValueError: for no target at all, a target or an override that matches no weight, or one that
        names the router.
    """
    if not targets:
        raise ValueError("adapter.targets is empty: name at least one linear layer")
    unused, unused_overrides = set(targets), {target for target, _ in overrides}

    def walk(tree: dict, path: tuple[str, ...]) -> dict:
        out = {}
        for name, node in tree.items():
            here = (*path, name)
            if isinstance(node, dict):
                if below := walk(node, here):
                    out[name] = below
                continue
            hits = {t for t in targets if is_named(t, here)}
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
                try:
                    out[name] = method_of(here, method, overrides).init(here_key, node.shape)
                except ValueError as error:
                    raise ValueError(f"the adapter of {'.'.join(here)}: {error}") from None
                unused_overrides.difference_update(t for t, _ in overrides if is_named(t, here))
        return out

    params = {"layers": [walk(stack, ()) for stack in base["layers"]]}
    if unused and (targets != LINEAR_LAYERS or unused == set(targets)):
        raise ValueError(
            f"adapter.targets: {sorted(unused)} match no weight of this base; the linear layers "
            f"are {LINEAR_LAYERS}"
        )
    if unused_overrides:
        raise ValueError(
            f"adapter.overrides: {sorted(unused_overrides)} match no adapted weight: name "
            "weights that adapter.targets names too"
        )
    return Adapter(params=params, method=method, overrides=overrides)


def is_named(target: str, path: Sequence[str]) -> bool:
    """Whether the weight at a module path is one that a target means."""
    parts = tuple(target.split("."))
    return tuple(path[-len(parts) :]) == parts


def at(params: dict | None, *names: str) -> dict | None:
    """The parameters below a module name, or None where nothing is attached."""
    for name in names:
        params = params.get(name) if params else None
    return params


def merge(adapter: Adapter, weights: dict) -> dict:
    """Folds the adapter into a tree of f32 weights that is shaped like the base."""

    def walk(here: Adapter, tree: dict) -> dict:
        merged = dict(tree)
        for name in here.params:
            if isinstance(tree[name], dict):
                merged[name] = walk(here.below(name), tree[name])
            else:
                merged[name] = here.method_at(name).merge(here.params[name], tree[name])
        return merged

    stacks = zip(adapter.params["layers"], weights["layers"], strict=True)
    layers = [walk(adapter.replace(params=params), tree) for params, tree in stacks]
    return {**weights, "layers": layers}


def fingerprint(tree: dict) -> jax.Array:
    """A uint32 checksum of a tree of f32 arrays: which adapter produced a rollout.

    Each element's bits are mixed with its place, so that any changed bit and any swap shows. Exact
    for any sharding (integer sums wrap the same in any order).
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = _mix(total + _checksum(leaf))
    return total


def _checksum(leaf: jax.Array) -> jax.Array:
    """Sum of the mixed bits of a stack, a layer at a time: all places at once would be as large."""
    rows = leaf if leaf.ndim > 1 else leaf[None]
    shape = rows.shape[1:]
    strides = [math.prod(shape[i + 1 :]) % 2**32 for i in range(len(shape))]

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, values = row
        place = number * jnp.uint32(math.prod(shape) % 2**32)
        for i, stride in enumerate(strides):
            place += jax.lax.broadcasted_iota(jnp.uint32, shape, i) * jnp.uint32(stride)
        bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
        return total + jnp.sum(_mix(bits + _mix(place)), dtype=jnp.uint32), None

    numbers = jnp.arange(len(rows), dtype=jnp.uint32)
    return jax.lax.scan(add, jnp.uint32(0), (numbers, rows))[0]


def _mix(x: jax.Array) -> jax.Array:
    """A one-to-one scrambling of uint32 (the finaliser of MurmurHash3; 0 stays 0)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
