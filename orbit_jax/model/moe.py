"""A mixture of experts without dropped tokens.

Every (token, choice) becomes a row in a block that belongs to one expert; blocks are taken one
after another, so only one expert's weights are ever widened, and experts that nobody chose cost
nothing. Each choice's output is returned in a slot of its own and the slots of a token are summed
in expert order, so that the result does not depend on which other tokens there are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.layers import linear, swiglu
from orbit_jax.model.stream import regroup
from orbit_jax.quant.matmul import matmul, over_rows
from orbit_jax.quant.qtensor import round_to


def route(
    config: ModelConfig, gate: jax.Array, layer: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax top-k router: experts `[N, k]` int32 in ascending order, f32 weights `[N, k]`."""
    probabilities = jax.nn.softmax(matmul(x, gate, (layer,)), axis=-1)
    weights, experts = lax.top_k(probabilities, config.top_k)  # ties go to the lower index
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    order = jnp.argsort(experts, axis=-1)
    return jnp.take_along_axis(experts, order, -1), jnp.take_along_axis(weights, order, -1)


def moe(
    config: ModelConfig,
    weights: dict,
    adapter: Adapter | None,
    layer: jax.Array,
    x: jax.Array,
    valid: jax.Array,
    skip_unused: bool,
) -> tuple[jax.Array, jax.Array]:
    """Feed-forward of `x[N, D]` through each token's chosen experts.

    Args:
      valid: [N] bool; padding reaches no expert.
      skip_unused: leave out blocks that hold no row. Not for training: through a conditional, a
        loop would save the whole stack of packed weights once per block for the backward pass.

    Returns:
      `[N, D]` in x's dtype, and how many tokens chose each expert, `[E]` int32.
    """
    experts, mixing = over_rows(
        lambda rows: route(config, weights["gate"], layer, rows), config.tile, x
    )
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    if config.mesh.size == 1:
        load = _count(experts, config.num_experts)
        slots = _dispatch(config, weights["experts"], adapter, layer, x, experts, skip_unused)
    else:
        load, slots = _exchange(config, weights["experts"], adapter, layer, x, experts, skip_unused)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(config.top_k):
        # Rounding each product keeps the compiler from fusing it with the sum in one program and
        # not in another.
        total = total + round_to(mixing[:, j, None] * slots[:, j], x.dtype).astype(jnp.float32)
    return round_to(total, x.dtype), load


def _exchange(
    config: ModelConfig,
    weights: dict,
    adapter: Adapter | None,
    layer: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    skip_unused: bool,
) -> tuple[jax.Array, jax.Array]:
    """`_dispatch` over the mesh: tokens are gathered, each device serves the experts it holds.

    A slot has one non-zero contributor, so the sums over devices are exact.
    """
    local = config.num_experts // config.mesh.size
    device = lax.axis_index("data") * config.mesh.tensor + lax.axis_index("tensor")
    x = lax.all_gather(x, "data", tiled=True)
    experts = lax.all_gather(experts, "data", tiled=True)
    load = _count(experts, config.num_experts)
    here = experts - device * local
    here = jnp.where((here >= 0) & (here < local), here, local)
    slots = lax.psum(_dispatch(config, weights, adapter, layer, x, here, skip_unused), "tensor")
    return load, lax.psum_scatter(slots, "data", tiled=True)


def _dispatch(
    config: ModelConfig,
    weights: dict,
    adapter: Adapter | None,
    layer: jax.Array,
    x: jax.Array,
    experts: jax.Array,
    skip_unused: bool,
) -> jax.Array:
    """Outputs `[N, k, D]` of each token's experts `[N, k]`; zero for experts out of range."""
    n, k = experts.shape
    count = weights["gate_proj"].shape[1]
    size = config.tile or min(config.expert_block, -(-n * k // (16 * count)) * 16)
    blocks = min(n * k, n * k // size + count)

    # Where each assignment goes: experts in order, each one's rows padded to whole blocks.
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    load = _count(experts, count)
    block_end = jnp.cumsum(-(-load // size))
    first_block = block_end - -(-load // size)
    first_rank = jnp.cumsum(load) - load
    in_order = chosen[order].clip(max=count - 1)
    place = first_block[in_order] * size + jnp.arange(n * k) - first_rank[in_order]
    place = jnp.where(chosen[order] < count, place, blocks * size)
    place_of = jnp.zeros(n * k, jnp.int32).at[order].set(place.astype(jnp.int32))
    assignment_of = jnp.full(blocks * size, n * k, jnp.int32)
    assignment_of = assignment_of.at[place_of].set(jnp.arange(n * k, dtype=jnp.int32), mode="drop")
    block = jnp.arange(blocks)
    expert_of_block = jnp.searchsorted(block_end, block, side="right").clip(max=count - 1)

    token_of = jnp.where(assignment_of < n * k, assignment_of // k, n)
    rows = regroup(x, token_of, place_of.reshape(n, k)).reshape(blocks, size, -1)
    # Adapters are gathered per block outside the loop: their gradient is then one sum at the end
    # and not a whole stack added to in every iteration.
    params = jax.tree.map(lambda p: p[expert_of_block], adapter.params if adapter else None)

    def feed_forward(xs: tuple) -> jax.Array:
        rows, expert, params = xs
        local = adapter.replace(params=params) if adapter else None

        def project(name: str, x: jax.Array) -> jax.Array:
            return linear(x, weights[name], (layer, expert), local, name)

        return project("down_proj", swiglu(project("gate_proj", rows), project("up_proj", rows)))

    def if_used(xs: tuple) -> jax.Array:
        used, *rest = xs
        return lax.cond(used, feed_forward, lambda xs: jnp.zeros_like(xs[0]), tuple(rest))

    if skip_unused:
        out = lax.map(if_used, (block < block_end[-1], rows, expert_of_block, params))
    else:
        out = lax.map(feed_forward, (rows, expert_of_block, params))
    out = out.reshape(blocks * size, -1)
    return regroup(out, place_of, assignment_of[:, None]).reshape(n, k, -1)


def _count(experts: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert is chosen, `[E]` int32; out-of-range choices are not counted."""
    chosen = experts.reshape(-1, 1) == jnp.arange(num_experts)
    return chosen.sum(axis=0, dtype=jnp.int32)
