"""Routed experts as one map with a backward pass of its own.

Every (token, choice) becomes a row in a block that belongs to one expert. A loop takes the blocks
one after another, as many as are in use: one expert's weights are widened at a time, and experts
that nobody chose cost nothing. Each choice's output is returned in a slot of its own and the slots
of a token are summed in expert order, so that the result does not depend on which other tokens
there are. No token is dropped.

The backward pass goes through the same blocks. Autodiff could not reverse a loop whose number of
turns is data, and would keep what all blocks made on the way.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from orbit_jax import exchange
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.layers import Module, linear, swiglu
from orbit_jax.quant.qtensor import QTensor, Unstacked, round_to


def mix_experts(module: Module, x: jax.Array, experts: jax.Array, mixing: jax.Array) -> jax.Array:
    """Each token's experts, weighted and summed.

    Args:
      module: the `experts` of a layer.
      x: `[N, D]`.
      experts: `[N, k]` int32 in ascending order; the number of experts or more for none.
      mixing: `[N, k]` f32 weights.

    Returns:
      Own columns of `[N, D]` in x's dtype.
    """
    frozen, trained = {}, {}
    for name, weight in module.weights.items():
        # A plain weight is one that is trained itself: the tiny base is pretrained this way.
        is_frozen = isinstance(weight, QTensor | Unstacked) or name.endswith("_bias")
        (frozen if is_frozen else trained)[name] = weight if is_frozen else weight[module.layer]
    return _mix(module.config, module.adapter, trained, frozen, module.layer, x, experts, mixing)


@struct.dataclass
class _Blocks:
    """Where each assignment (token, choice) goes: experts in order, whole blocks of rows for each.

    Attributes:
      expert: [blocks] int32.
      assignment: [blocks, size] int32, n*k + j; N*k for an unused row.
      place: [N, k] int32, the row of each assignment; out of range for none.
      used: int32 scalar, blocks in use, which come first.
    """

    expert: jax.Array
    assignment: jax.Array
    place: jax.Array
    used: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    config: ModelConfig,
    adapter: Adapter | None,
    trained: dict,
    frozen: dict,
    layer: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    mixing: jax.Array,
) -> jax.Array:
    return _forward(config, adapter, trained, frozen, layer, x, experts, mixing)[0]


def _forward(
    config: ModelConfig,
    adapter: Adapter | None,
    trained: dict,
    frozen: dict,
    layer: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    mixing: jax.Array,
) -> tuple[jax.Array, tuple]:
    here, everyone = _served_here(config, experts), exchange.gather_for_experts(config.mesh, x)
    blocks = _assign(config, here)
    count, size = blocks.assignment.shape
    k, dtype = experts.shape[1], x.dtype

    def turn(i: jax.Array, made: tuple) -> tuple:
        rows, expert = _take(everyone, blocks.assignment[i] // k), blocks.expert[i]
        inner, outer = _halves(config, frozen, (layer, expert))
        weights = _of_expert((adapter, trained), expert)
        wide = inner(weights, rows)
        new = (outer(weights, *wide), *wide)
        # What is not kept is not there.
        return tuple(_put(buffer, part, i) for buffer, part in zip(made, new, strict=False))

    widths = (x.shape[1], config.expert_size, config.expert_size)
    if config.remat:
        widths = widths[:1]  # the backward pass makes gate and up again
    made = tuple(jnp.zeros((count * size, width), dtype) for width in widths)
    out, *kept = lax.fori_loop(0, blocks.used, turn, made)
    slots = jnp.take(out, blocks.place, axis=0, mode="fill", fill_value=0)
    slots = exchange.return_from_experts(config.mesh, slots)
    total = jnp.zeros((slots.shape[0], slots.shape[2]), jnp.float32)
    for j in range(k):
        # Rounding each product keeps the compiler from fusing it with the sum in one program and
        # not in another.
        total = total + round_to(mixing[:, j, None] * slots[:, j], dtype).astype(jnp.float32)
    return round_to(total, dtype), (adapter, trained, frozen, layer, x, experts, mixing, kept)


def _backward(config: ModelConfig, residual: tuple, g: jax.Array) -> tuple:
    adapter, trained, frozen, layer, x, experts, mixing, kept = residual
    here, everyone = _served_here(config, experts), exchange.gather_for_experts(config.mesh, x)
    blocks = _assign(config, here)
    count, size = blocks.assignment.shape
    k = experts.shape[1]
    # The cotangent of the sum goes to the experts, not those of its k terms.
    g = exchange.gather_for_backward(config.mesh, g)
    weight_of = exchange.gather_for_experts(config.mesh, mixing).reshape(-1)

    def turn(i: jax.Array, carry: tuple) -> tuple:
        moved, slopes, changes = carry
        assignment, expert = blocks.assignment[i], blocks.expert[i]
        rows, moves = (_take(of_tokens, assignment // k) for of_tokens in (everyone, g))
        inner, outer = _halves(config, frozen, (layer, expert))
        weights = _of_expert((adapter, trained), expert)
        wide, back_inner = jax.vjp(inner, weights, rows)
        if kept:
            wide = tuple(lax.dynamic_slice_in_dim(part, i * size, size) for part in kept)
        out, back_outer = jax.vjp(outer, weights, *wide)
        slope = (out.astype(jnp.float32) * moves.astype(jnp.float32)).sum(axis=-1)
        moves = round_to(_take(weight_of, assignment)[:, None] * moves, moves.dtype)
        change, *moves = back_outer(moves)
        more, moves = back_inner(tuple(moves))
        change = jax.tree.map(jnp.add, change, more)
        changes = jax.tree.map(functools.partial(_add, expert), changes, change)
        return _put(moved, moves, i), _put(slopes, slope, i), changes

    moved = jnp.zeros((count * size, x.shape[1]), x.dtype)
    changes = jax.tree.map(jnp.zeros_like, (adapter, trained))
    carry = (moved, jnp.zeros(count * size, jnp.float32), changes)
    moved, slopes, (of_adapter, of_trained) = lax.fori_loop(0, blocks.used, turn, carry)
    moved = jnp.take(moved, blocks.place, axis=0, mode="fill", fill_value=0)
    moved = moved.astype(jnp.float32).sum(axis=1).astype(x.dtype)
    slopes = jnp.take(slopes, blocks.place, mode="fill", fill_value=0)
    moved, slopes = (exchange.sum_to_shards(config.mesh, y) for y in (moved, slopes))
    return of_adapter, of_trained, None, None, moved, None, slopes


_mix.defvjp(_forward, _backward)


def _served_here(config: ModelConfig, experts: jax.Array) -> jax.Array:
    """All tokens' experts `[N, k]` counted from this device's first; out of range for others'."""
    if config.mesh.size == 1:
        return experts
    local = config.num_experts // config.mesh.size
    experts = exchange.gather_for_experts(config.mesh, experts)
    here = experts - lax.axis_index(("data", "tensor")) * local
    return jnp.where((here >= 0) & (here < local), here, local)


def _assign(config: ModelConfig, experts: jax.Array) -> _Blocks:
    """Lays out the assignments `experts[N, k]` to the experts that are held here."""
    n, k = experts.shape
    held = config.num_experts // config.mesh.size
    size = config.tile or min(config.expert_block, -(-n * k // (16 * held)) * 16)
    blocks = min(n * k, n * k // size + held)
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    load = count_choices(experts, held)
    block_end = jnp.cumsum(-(-load // size))
    first_block = block_end - -(-load // size)
    first_rank = jnp.cumsum(load) - load
    in_order = chosen[order].clip(max=held - 1)
    place = first_block[in_order] * size + jnp.arange(n * k) - first_rank[in_order]
    place = jnp.where(chosen[order] < held, place, blocks * size)
    place_of = jnp.zeros(n * k, jnp.int32).at[order].set(place.astype(jnp.int32))
    assignment = jnp.full(blocks * size, n * k, jnp.int32)
    assignment = assignment.at[place_of].set(jnp.arange(n * k, dtype=jnp.int32), mode="drop")
    expert = jnp.searchsorted(block_end, jnp.arange(blocks), side="right").clip(max=held - 1)
    return _Blocks(
        expert=expert.astype(jnp.int32),
        assignment=assignment.reshape(blocks, size),
        place=place_of.reshape(n, k),
        used=block_end[-1],
    )


def count_choices(experts: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert is chosen, `[E]` int32; out-of-range choices are not counted."""
    chosen = experts.reshape(-1, 1) == jnp.arange(num_experts)
    return chosen.sum(axis=0, dtype=jnp.int32)


def _halves(config: ModelConfig, frozen: dict, index: tuple) -> tuple[Callable, Callable]:
    """The two halves of the expert at `index`, over what is trained of it and rows.

    The first makes `gate, up[size, F]` of `rows[size, D]`, the second makes rows of them.
    """

    def project(weights: tuple, name: str, x: jax.Array) -> jax.Array:
        adapter, trained = weights
        bias = frozen[f"{name}_bias"][index] if config.expert_bias else None
        where = (trained[name], ()) if name in trained else (frozen[name], index)
        return linear(x, *where, adapter, name, bias=bias)

    def inner(weights: tuple, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return project(weights, "gate_proj", rows), project(weights, "up_proj", rows)

    def outer(weights: tuple, gate: jax.Array, up: jax.Array) -> jax.Array:
        mid = swiglu(gate, up, config.swiglu_limit, config.swiglu_alpha)
        return project(weights, "down_proj", mid)

    return inner, outer


def _of_expert(tree: tuple, expert: jax.Array) -> tuple:
    """What is trained of one expert, out of that of all `[E, ...]`."""
    return jax.tree.map(lambda leaf: leaf[expert], tree)


def _add(expert: jax.Array, total: jax.Array, new: jax.Array) -> jax.Array:
    return total.at[expert].add(new)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _put(buffer: jax.Array, rows: jax.Array, block: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(buffer, rows, block * len(rows), axis=0)
