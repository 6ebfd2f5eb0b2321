"""A mixture of experts without dropped tokens.

Every (token, choice) becomes a row in a block that belongs to one expert; blocks are taken one
after another, so only one expert's weights are ever widened, and experts that nobody chose cost
nothing. Each choice's output is returned in a slot of its own and the slots of a token are summed
in expert order, so that the result does not depend on which other tokens there are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.layers import Module, linear, swiglu
from orbit_jax.model.stream import regroup
from orbit_jax.quant.matmul import matmul_exact, over_rows
from orbit_jax.quant.qtensor import round_to


def route(module: Module, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The router: experts `[N, k]` int32 in ascending order, and their f32 weights `[N, k]`."""
    config = module.config
    logits = matmul_exact(x, module.weights["gate"], (module.layer,))
    if config.router == "chosen":
        logits = logits + module.vector("gate_bias").astype(jnp.float32)
        best, experts = lax.top_k(logits, config.top_k)
        weights = jax.nn.softmax(best, axis=-1)
    elif config.router == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        preference = scores + module.vector("e_score_correction_bias").astype(jnp.float32)
        _, experts = lax.top_k(_in_best_groups(config, preference), config.top_k)
        weights = jnp.take_along_axis(scores, experts, -1)
    else:
        # Ties go to the lower index, here and above.
        weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), config.top_k)
    if config.norm_topk_prob:
        floor = 1e-20 if config.router == "sigmoid" else 0.0
        weights = weights / (weights.sum(axis=-1, keepdims=True) + floor)
    if config.routed_scale != 1.0:
        weights = weights * config.routed_scale
    order = jnp.argsort(experts, axis=-1)
    return jnp.take_along_axis(experts, order, -1), jnp.take_along_axis(weights, order, -1)


def _in_best_groups(config: ModelConfig, preference: jax.Array) -> jax.Array:
    """Preferences `[N, E]`, -inf outside the groups whose two best experts sum highest."""
    if config.num_groups == 1:
        return preference
    groups = preference.reshape(-1, config.num_groups, config.num_experts // config.num_groups)
    best, _ = lax.top_k(groups, min(2, groups.shape[-1]))
    _, chosen = lax.top_k(best.sum(axis=-1), config.top_groups)
    allowed = (chosen[:, :, None] == jnp.arange(config.num_groups)).any(axis=1)
    return jnp.where(allowed[:, :, None], groups, -jnp.inf).reshape(preference.shape)


def moe(
    module: Module, x: jax.Array, valid: jax.Array, *, skip_unused: bool
) -> tuple[jax.Array, jax.Array]:
    """Feed-forward of `x[N, D]` through each token's chosen experts.

    Args:
      module: with the router `gate` and the `experts`.
      valid: [N] bool; padding reaches no expert.
      skip_unused: leave out blocks that hold no row. Not for training: through a conditional, a
        loop would save the whole stack of packed weights once per block for the backward pass.

    Returns:
      `[N, D]` in x's dtype, and how many tokens chose each expert, `[E]` int32.
    """
    config = module.config
    experts, mixing = over_rows(lambda rows: route(module, rows), config.tile, x)
    experts = jnp.where(valid[:, None], experts, config.num_experts)
    if config.mesh.size == 1:
        load = _count(experts, config.num_experts)
        slots = _dispatch(module.below("experts"), x, experts, skip_unused)
    else:
        load, slots = _exchange(module.below("experts"), x, experts, skip_unused)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(config.top_k):
        # Rounding each product keeps the compiler from fusing it with the sum in one program and
        # not in another.
        total = total + round_to(mixing[:, j, None] * slots[:, j], x.dtype).astype(jnp.float32)
    return round_to(total, x.dtype), load


def _exchange(
    module: Module, x: jax.Array, experts: jax.Array, skip_unused: bool
) -> tuple[jax.Array, jax.Array]:
    """`_dispatch` over the mesh: tokens are gathered, each device serves the experts it holds.

    A slot has one non-zero contributor, so the sums over devices are exact.
    """
    config = module.config
    local = config.num_experts // config.mesh.size
    device = lax.axis_index("data") * config.mesh.tensor + lax.axis_index("tensor")
    x = lax.all_gather(x, "data", tiled=True)
    experts = lax.all_gather(experts, "data", tiled=True)
    load = _count(experts, config.num_experts)
    here = experts - device * local
    here = jnp.where((here >= 0) & (here < local), here, local)
    slots = lax.psum(_dispatch(module, x, here, skip_unused), "tensor")
    return load, lax.psum_scatter(slots, "data", tiled=True)


def _dispatch(module: Module, x: jax.Array, experts: jax.Array, skip_unused: bool) -> jax.Array:
    """Outputs `[N, k, D]` of each token's experts `[N, k]`; zero for experts out of range."""
    config, weights, adapter, layer = module.config, module.weights, module.adapter, module.layer
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
            bias = weights[f"{name}_bias"][layer, expert] if config.expert_bias else None
            return linear(x, weights[name], (layer, expert), local, name, bias=bias)

        gate, up = project("gate_proj", rows), project("up_proj", rows)
        return project("down_proj", swiglu(gate, up, config.swiglu_limit, config.swiglu_alpha))

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
