"""The PPO step: one jitted function from a batch of rollouts to the next state.

Read `ppo_step` from top to bottom: what was sampled, what it was worth, how the policy moves.
Micro-batches are scanned, gradients are sums over tokens divided once by the token count of the
optimiser batch, and an update that must not happen is deselected inside, since the old state is
donated.
"""

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter, fingerprint
from orbit_jax.config import OptimizerConfig, PPOConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import score
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.matmul import dot
from orbit_jax.rl import losses
from orbit_jax.rl.advantages import AdvantageFn, Experience, last_token
from orbit_jax.rl.batch import Batch
from orbit_jax.rl.losses import LossFn
from orbit_jax.rl.metrics import Sums, group_norms
from orbit_jax.rl.train_state import Critic, TrainState, make_optimizer, state_specs, trainable


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What the step depends on. `exact` is false only under the `corrected` parity recipe."""

    model: ModelConfig
    ppo: PPOConfig
    optimizer: OptimizerConfig
    seed: int = 0
    exact: bool = True


def ppo_step(
    config: StepConfig,
    base: dict,
    state: TrainState,
    batch: Batch,
    loss_fn: LossFn,
    advantage_fn: AdvantageFn,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Old values, advantages, epochs of minibatches, update.

    Args:
      config: static; so are `loss_fn` and `advantage_fn`.
      base: the frozen weights: an argument, never closed over, never differentiated.
      state: donated.
      batch: rollouts with rewards.

    Returns:
      The new state, or the old one where an update must not happen, and scalar metrics. The state
      is kept as it was when the log-probs of sampler and trainer differ (`config.exact`), when
      another adapter sampled, when nothing is left to train on, or when a gradient or the
      parameters that it leads to are not finite.
    """
    ppo, rows = config.ppo, batch.stream.rows
    finite = jnp.isfinite(batch.rewards)
    mask = batch.sampled & _of_rows(finite, rows)
    old = jnp.where(mask, batch.logprobs, 0.0)
    forward = functools.partial(_forward, config, base, temperature=batch.temperature)

    def over_micro_batches(fn: Callable):
        return lax.map(lambda xs: fn(*xs), (batch.stream, batch.scored))

    # Before the first update: the trainer's own log-probs where the loss cannot give them for free,
    # the critic's values, the reference's log-probs.
    updates = ppo.epochs * ppo.minibatches
    gap, weights = None, jnp.ones_like(old)
    if updates > 1 or not config.exact:
        own = over_micro_batches(lambda *micro: forward(state.policy, *micro)[0])
        own = jnp.where(mask, own, 0.0)
        gap = jnp.abs(own - old).max()
        if not config.exact:
            weights = jnp.minimum(jnp.exp(own - old), ppo.max_importance_weight)
            old = own
    values, last_values = jnp.zeros_like(old), jnp.zeros_like(batch.rewards)
    if state.critic is not None:
        values, after = over_micro_batches(
            lambda stream, _: _values(config, base, state.critic, stream)
        )
        last = jax.vmap(last_token)(mask, rows, batch.rewards)
        last_values = jnp.take_along_axis(after, last.clip(max=rows.shape[1] - 1), axis=1)
    reference = old
    if ppo.kl != "off":
        reference = over_micro_batches(lambda *micro: forward(state.reference, *micro)[0])
        reference = jnp.where(mask, reference, 0.0)
    penalty = jnp.zeros_like(old)
    if ppo.kl == "reward":
        penalty = ppo.kl_coefficient * losses.k1(old, reference)
    experience = Experience(
        mask=mask,
        rows=rows,
        rewards=jnp.where(finite, batch.rewards, 0.0),
        counted=finite,
        groups=batch.groups,
        truncated=batch.truncated,
        penalty=penalty,
        values=values,
        last_values=last_values,
        num_groups=batch.num_groups,
    )
    advantages, returns = advantage_fn(ppo, experience)
    chex.assert_shape([advantages, returns], mask.shape)
    targets = {
        "stream": batch.stream,
        "scored": batch.scored,
        "mask": mask,
        "old": old,
        "weights": weights,
        "reference": reference,
        "advantages": jnp.where(mask, advantages, 0.0),
        "values": values,
        "returns": jnp.where(mask, returns, 0.0),
    }

    same_adapter = fingerprint(state.policy.params) == batch.fingerprint
    optimizer = make_optimizer(config.optimizer)

    def update(carry: tuple, micro_ids: jax.Array) -> tuple:
        """One optimiser update from the micro-batches numbered `micro_ids`, unless it must not be.

        What is deselected is decided before, so that parameters and moments are replaced in place.
        """
        params, moments = carry
        chosen = jax.tree.map(lambda x: x[micro_ids], targets)
        count = chosen["mask"].sum()
        policy_loss = functools.partial(
            _policy_loss, config, base, state, loss_fn, batch.temperature, count
        )
        parts = {"policy": policy_loss}
        if state.critic is not None:
            parts["critic"] = functools.partial(_value_loss, config, base, state.critic, count)
        grads, sums = {}, {}
        # One after the other: what a backward pass reads is there for one of them at a time.
        for part, loss in parts.items():
            grads[part], sums[part] = _summed_gradient(loss, params[part], chosen)
        difference = sums["policy"].maxima["parity/max_abs_diff"] if gap is None else gap
        ok = same_adapter & (count > 0)
        if config.exact:
            ok &= difference == 0  # false for NaN too
        changes, _ = optimizer.update(grads, moments, params)
        after = optax.apply_updates(params, changes)
        ok &= jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(optax.tree.norm(after))
        sizes = {
            name: jnp.where(ok, moved / jnp.maximum(size, 1e-12), 0.0)
            for (name, moved), size in zip(
                group_norms(changes).items(), group_norms(params).values(), strict=True
            )
        }
        # Behind the barrier all of it is made again, instead of being kept until `ok` is known.
        ok, grads, moments, params = lax.optimization_barrier((ok, grads, moments, params))
        changes, moments_after = optimizer.update(grads, moments, params)
        select = functools.partial(jnp.where, ok)
        moments = jax.tree.map(select, moments_after, moments)
        params = jax.tree.map(select, optax.apply_updates(params, changes), params)
        return (params, moments), (sums, group_norms(grads), sizes, difference, ok)

    order = _micro_batch_order(config, state.step, rows.shape[0])
    carry = trainable(state.policy, state.critic), state.optimizer
    if updates == 1:
        carry, seen = update(carry, order[0])
        seen = jax.tree.map(lambda x: x[None], seen)
    else:
        carry, seen = lax.scan(update, carry, order)
    (params, moments), (sums, gradient_norms, sizes, gaps, applied) = carry, seen
    gap, ok = gaps[0], applied.any()
    critic = state.critic and state.critic.replace(
        adapter=state.critic.adapter.replace(params=params["critic"]["adapter"]),
        head=params["critic"]["head"],
    )
    state = TrainState(
        policy=state.policy.replace(params=params["policy"]),
        critic=critic,
        reference=state.reference,
        optimizer=moments,
        step=state.step + ok,
    )
    sizes = {name: each.sum() for name, each in sizes.items()}
    metrics = {name: value for part in sums.values() for name, value in part.finish().items()}
    metrics |= {
        "parity/max_abs_diff": gap,
        "parity/tokens": mask.sum(),
        "parity/extra_forwards": jnp.int32(updates > 1 or not config.exact),
        "update/applied": ok.astype(jnp.int32),
        "update/same_adapter": same_adapter.astype(jnp.int32),
        "update/skipped_minibatches": (~applied).sum(),
        "reward/infra_failures": (~finite).sum(),
        "tokens_computed": (rows < batch.stream.num_rows).sum(),
        **{f"gradient_norm/{k}": v.mean() for k, v in gradient_norms.items()},
        **{f"adapter/update_size/{k}": v for k, v in sizes.items()},
        "adapter/update_size": sizes["policy"],
    }
    return mesh.constrain(config.model, state, state_specs(config.model, state)), metrics


def _summed_gradient(loss: Callable, params: dict, chosen: dict) -> tuple[dict, Sums]:
    """The gradient of the sum of `loss(params, micro_batch)`, and the sums of its second result."""
    gradient = functools.partial(jax.grad(loss, has_aux=True), params)

    def accumulate(total: tuple, micro: dict) -> tuple[tuple, None]:
        grads, sums = gradient(micro)
        return (jax.tree.map(jnp.add, total[0], grads), total[1].merge(sums)), None

    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], chosen))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(accumulate, zero, chosen)[0]


def _policy_loss(
    config: StepConfig,
    base: dict,
    state: TrainState,
    loss_fn: LossFn,
    temperature: jax.Array,
    count: jax.Array,
    params: dict,
    micro: dict,
) -> tuple[jax.Array, Sums]:
    """A micro-batch's share of the loss: sums over its tokens divided by the update's `count`."""
    ppo, mask = config.ppo, micro["mask"]
    logprobs, entropy, load = _forward(
        config,
        base,
        state.policy.replace(params=params),
        micro["stream"],
        micro["scored"],
        temperature,
    )
    # What stands in masked places, finite or not, must reach neither the loss nor a gradient.
    logprobs = jnp.where(mask, logprobs, 0.0)
    entropy = jnp.where(mask, entropy, 0.0)
    old, reference = micro["old"], micro["reference"]
    result = loss_fn(ppo, logprobs, old, micro["advantages"])
    if not isinstance(result, tuple):
        raise ValueError("loss_fn must return (loss of each token, metrics of each token by name)")
    token_loss, extra = result
    chex.assert_shape([token_loss, *extra.values()], mask.shape)  # a mean would weigh wrongly
    token_loss = token_loss * micro["weights"]
    if ppo.kl == "loss":
        token_loss += ppo.kl_coefficient * losses.kl_in_loss(logprobs, reference)
    if ppo.entropy_coefficient:
        token_loss -= ppo.entropy_coefficient * entropy
    total = jnp.where(mask, token_loss, 0.0).sum() / jnp.maximum(count, 1)
    difference = logprobs - old
    ratio = jnp.exp(jnp.clip(difference, -20.0, 20.0))
    sums = {
        "loss/policy": token_loss,
        "ratio/mean": ratio,
        "entropy": entropy,
        "kl/rollout_k1": losses.k1(old, logprobs),
        "kl/rollout_k3": losses.k3(old, logprobs),
        **extra,
    }
    if ppo.kl != "off":
        sums |= {
            "kl/reference_k1": losses.k1(logprobs, reference),
            "kl/reference_k3": losses.k3(logprobs, reference),
        }
    maxima = {"parity/max_abs_diff": jnp.abs(difference), "ratio/max": ratio}
    return total, Sums.of(sums, maxima, mask, load)


def _value_loss(
    config: StepConfig,
    base: dict,
    critic: Critic,
    count: jax.Array,
    params: dict,
    micro: dict,
) -> tuple[jax.Array, Sums]:
    """The same of the critic's loss."""
    ppo, mask = config.ppo, micro["mask"]
    critic = critic.replace(
        adapter=critic.adapter.replace(params=params["adapter"]), head=params["head"]
    )
    value, _ = _values(config, base, critic, micro["stream"])
    error = jnp.square(value - micro["returns"])
    if ppo.value_clip:
        near = micro["values"] + jnp.clip(value - micro["values"], -ppo.value_clip, ppo.value_clip)
        error = jnp.maximum(error, jnp.square(near - micro["returns"]))
    loss = 0.5 * jnp.where(mask, error, 0.0)
    total = ppo.value_coefficient * loss.sum() / jnp.maximum(count, 1)
    sums = {"loss/value": loss, "value/mean": value, "value/return": micro["returns"]}
    return total, Sums.of(sums, {}, mask, jnp.zeros((0, 0), jnp.int32))


def _forward(
    config: StepConfig,
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    scored: jax.Array | None,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs and entropies [N], standing at the tokens that they are of, and expert loads.

    They are 0 where not `scored` (see `Batch`; None scores all).
    """
    hidden, _, load = apply(config.model, base, adapter, stream)
    # Rows are contiguous: the target of a token is its right neighbour, and what was computed for
    # it moves right by one.
    targets = jnp.roll(stream.tokens, -1)
    logprobs, entropy = score(
        config.model,
        base,
        hidden,
        targets,
        jnp.broadcast_to(temperature, targets.shape),
        places=scored,
        entropy_gradient=config.ppo.entropy_coefficient > 0,
    )
    return jnp.roll(logprobs, 1), jnp.roll(entropy, 1), load


def _values(
    config: StepConfig, base: dict, critic: Critic, stream: Stream
) -> tuple[jax.Array, jax.Array]:
    """The critic's value before each token and after it, both [N] f32."""
    hidden, _, _ = apply(config.model, base, critic.adapter, stream)
    after = dot(hidden, critic.head[None].astype(hidden.dtype))[:, 0]
    return jnp.roll(after, 1), after


def _of_rows(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """[M, R] to [M, N]: the value of each token's row, zero at padding."""
    padded = jnp.pad(per_row, ((0, 0), (0, 1)))
    return jnp.take_along_axis(padded, rows, axis=1)


def _micro_batch_order(config: StepConfig, step: jax.Array, micro_batches: int) -> jax.Array:
    """[updates, micro-batches per update]: each epoch visits all, in an order of its own."""
    ppo = config.ppo
    if ppo.epochs * ppo.minibatches == 1:
        return jnp.arange(micro_batches)[None]
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    keys = jax.random.split(key, ppo.epochs)
    orders = jax.vmap(lambda k: jax.random.permutation(k, micro_batches))(keys)
    return orders.reshape(ppo.epochs * ppo.minibatches, -1)
