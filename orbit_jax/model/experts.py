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

_MAX_SLOT_BYTES = 128 << 20  # of all choices' outputs that travel between devices together


def mix_experts(module: Module, x: jax.Array, experts: jax.Array, mixing: jax.Array) -> jax.Array:
    """Each token's experts, weighted and summed.

    Args:
      module: the `experts` of a layer.
      x: `[N, D]`.
      experts: `[N, k]` int32 in ascending order; the number of experts or more for none.
      mixing: `[N, k]` f32 weights.

    Returns:
      Own tokens of `[N, D]` in x's dtype.
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
      used: int32 scalar, blocks in use, which come first.
    """

    expert: jax.Array
    assignment: jax.Array
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
    (count, size), (n, k) = blocks.assignment.shape, here.shape

    def turn(i: jax.Array, made: tuple) -> tuple:
        (slots, kept), assignment, expert = made, blocks.assignment[i], blocks.expert[i]
        inner, outer = _halves(config, frozen, (layer, expert))
        weights = _of_expert((adapter, trained), expert)
        wide = inner(weights, _take(everyone, assignment // k))
        if kept:
            kept = tuple(map(functools.partial(_put_block, i * size), kept, wide))
        return _put(slots, assignment, outer(weights, *wide)), kept

    shapes = () if config.remat else 2 * ((count * size, config.expert_size),)
    kept = tuple(jnp.zeros(shape, x.dtype) for shape in shapes)
    slots = jnp.zeros((n * k, x.shape[1]), x.dtype)
    slots, kept = lax.fori_loop(0, blocks.used, turn, (slots, kept))
    total = _weighted_sum(config, slots.reshape(n, k, -1), mixing)
    return round_to(total, x.dtype), (adapter, trained, frozen, layer, x, experts, mixing, kept)


def _weighted_sum(config: ModelConfig, slots: jax.Array, mixing: jax.Array) -> jax.Array:
    """Own tokens' sums `[N/t, D]` in f32 of slots `[all N, k, D]`, in the order of experts.

    Slots travel together, or one choice after another where that would be much memory.
    """
    k, width, mixing = *slots.shape[1:], exchange.own_tokens(config.mesh, mixing)

    def add(total: jax.Array, j: jax.Array | int, slot: jax.Array) -> jax.Array:
        # Rounding each product keeps the compiler from fusing it with the sum in one program and
        # not in another.
        weight = lax.dynamic_index_in_dim(mixing, j, axis=1)
        return total + round_to(weight * slot, slots.dtype).astype(jnp.float32)

    def travel_and_add(j: jax.Array, total: jax.Array) -> jax.Array:
        slot = lax.dynamic_index_in_dim(slots, j, axis=1, keepdims=False)
        return add(total, j, exchange.return_from_experts(config.mesh, slot))

    total = jnp.zeros((mixing.shape[0], width), jnp.float32)
    if config.mesh.size > 1 and slots.size * slots.dtype.itemsize > _MAX_SLOT_BYTES:
        return lax.fori_loop(0, k, travel_and_add, total)
    slots = exchange.return_from_experts(config.mesh, slots)
    for j in range(k):
        total = add(total, j, slots[:, j])
    return total


def _backward(config: ModelConfig, residual: tuple, g: jax.Array) -> tuple:
    adapter, trained, frozen, layer, x, experts, mixing, kept = residual
    here, everyone = _served_here(config, experts), exchange.gather_for_experts(config.mesh, x)
    blocks = _assign(config, here)
    size, (n, k) = blocks.assignment.shape[1], here.shape
    # The cotangent of the sum goes to the experts, not those of its k terms.
    g = exchange.gather_from_tokens(config.mesh, g)
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
        # No expert has a token twice.
        moves = moves.astype(jnp.float32)
        moved = moved.at[assignment // k].add(moves, mode="drop", unique_indices=True)
        return moved, _put(slopes, assignment, slope), changes

    carry = (
        jnp.zeros((n, x.shape[1]), jnp.float32),
        jnp.zeros(n * k, jnp.float32),
        jax.tree.map(jnp.zeros_like, (adapter, trained)),
    )
    moved, slopes, (of_adapter, of_trained) = lax.fori_loop(0, blocks.used, turn, carry)
    moved, slopes = moved.astype(x.dtype), slopes.reshape(n, k)
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
    """What is trained of one expert: of all `[E, ...]`, or of what they share `[1, ...]`."""
    return jax.tree.map(lambda leaf: leaf[_at(expert, leaf)], tree)


def _add(expert: jax.Array, total: jax.Array, new: jax.Array) -> jax.Array:
    return total.at[_at(expert, total)].add(new)


def _at(expert: jax.Array, leaf: jax.Array) -> jax.Array | int:
    return expert if len(leaf) > 1 else 0


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _put(buffer: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """`buffer` with its rows at `index` replaced; an index out of range is for none."""
    return buffer.at[index].set(rows, mode="drop", unique_indices=True)


def _put_block(start: jax.Array, buffer: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(buffer, rows, start, axis=0)
