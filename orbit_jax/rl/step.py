"""The PPO step: one jitted function from a batch of rollouts to the next state.

Read `ppo_step` from top to bottom: what was sampled, what it was worth, how the policy moves.
Micro-batches are scanned, gradients are sums over tokens that are weighed over the whole optimiser
batch, and an update that must not happen is deselected inside, since the old state is donated.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from orbit_jax import mesh
from orbit_jax.adapters.adapter import fingerprint
from orbit_jax.rl import kl
from orbit_jax.rl.advantages import AdvantageFn, Experience
from orbit_jax.rl.aggregation import token_weights
from orbit_jax.rl.batch import Batch
from orbit_jax.rl.correction import importance_weights
from orbit_jax.rl.losses import LossFn
from orbit_jax.rl.metrics import Sums, group_norms
from orbit_jax.rl.objective import StepConfig, forward, policy_loss, value_loss, values
from orbit_jax.rl.rows import last_token, to_tokens
from orbit_jax.rl.train_state import TrainState, make_optimizer, state_specs, trainable


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
      is kept as it was when nothing is left to train on, when a gradient or the parameters that it
      leads to are not finite, when the policy is further than `ppo.max_kl` from the one that
      sampled, or, with `config.exact`, when the log-probs of sampler and trainer differ or another
      adapter sampled.
    """
    ppo, rows, num_rows = config.ppo, batch.stream.rows, batch.stream.num_rows
    finite = jnp.isfinite(batch.rewards)
    mask = batch.sampled & jax.vmap(to_tokens)(finite, rows)
    trained = mask
    if ppo.overlong_filter:  # of these rows only the reward is read
        trained &= ~jax.vmap(to_tokens)(batch.truncated, rows)
    old = jnp.where(mask, batch.logprobs, 0.0)
    own_logprobs = functools.partial(forward, config, base, temperature=batch.temperature)

    def over_micro_batches(fn: Callable):
        return lax.map(lambda xs: fn(*xs), (batch.stream, batch.scored))

    # Before the first update: the trainer's own log-probs where the loss cannot give them for free,
    # the critic's values, the reference's log-probs.
    gap, importance = None, jnp.ones_like(old)
    if ppo.updates > 1 or not config.exact:
        own = over_micro_batches(lambda *micro: own_logprobs(state.policy, *micro)[0])
        own = jnp.where(mask, own, 0.0)
        gap = jnp.abs(own - old).max()
        if not config.exact:
            importance, old = importance_weights(ppo, own, old, rows, num_rows), own
    value_before, value_after_last = jnp.zeros_like(old), jnp.zeros_like(batch.rewards)
    if state.critic is not None:
        value_before, after = over_micro_batches(
            lambda stream, _: values(config, base, state.critic, stream)
        )
        last = jax.vmap(lambda on, row: last_token(on, row, num_rows))(mask, rows)
        value_after_last = jnp.take_along_axis(after, last.clip(max=rows.shape[1] - 1), axis=1)
    reference = old
    if ppo.kl != "off":
        reference = over_micro_batches(lambda *micro: own_logprobs(state.reference, *micro)[0])
        reference = jnp.where(mask, reference, 0.0)
    measured_kl = kl.ESTIMATORS[ppo.kl_estimator](old, reference)  # 0 outside the mask
    kl_coefficient = state.kl_coefficient
    if kl_coefficient is None:
        kl_coefficient = jnp.float32(ppo.kl_coefficient)
    experience = Experience(
        mask=mask,
        rows=rows,
        rewards=jnp.where(finite, batch.rewards, 0.0),
        counted=finite,
        groups=batch.groups,
        truncated=batch.truncated,
        penalty=kl_coefficient * measured_kl if ppo.kl == "reward" else jnp.zeros_like(old),
        values=value_before,
        last_values=value_after_last,
        num_groups=batch.num_groups,
    )
    advantages, returns = advantage_fn(ppo, experience)
    chex.assert_shape([advantages, returns], mask.shape)
    targets = {
        "stream": batch.stream,
        "scored": batch.scored,
        "mask": mask,
        "trained": trained,
        "old": old,
        "importance": importance,
        "reference": reference,
        "advantages": jnp.where(mask, advantages, 0.0),
        "values": value_before,
        "returns": jnp.where(mask, returns, 0.0),
    }

    same_adapter = fingerprint(state.policy.params) == batch.fingerprint
    optimizer = make_optimizer(config.optimizer)

    def update(carry: tuple, micro_ids: jax.Array) -> tuple:
        """One optimiser update from the micro-batches numbered `micro_ids`, unless it must not be.

        What is deselected is decided before, so that parameters and moments are replaced in place.
        """
        params, moments, stopped = carry
        chosen = jax.tree.map(lambda x: x[micro_ids], targets)
        weights = functools.partial(
            token_weights,
            trained=chosen["trained"],
            rows=chosen["stream"].rows,
            num_rows=num_rows,
            max_completion_tokens=config.max_completion_tokens,
        )
        chosen |= {"weights": weights(ppo.aggregation), "value_weights": weights("token_mean")}
        frozen = (config, base, state, batch.temperature, kl_coefficient)
        parts = {"policy": functools.partial(policy_loss, *frozen, loss_fn)}
        if state.critic is not None:
            parts["critic"] = functools.partial(value_loss, config, base, state.critic)
        grads, sums = {}, {}
        # One after the other: what a backward pass reads is there for one of them at a time.
        for part, loss in parts.items():
            grads[part], sums[part] = _summed_gradient(loss, params[part], chosen)
        difference = sums["policy"].maxima["parity/max_abs_diff"] if gap is None else gap
        # Some token must weigh something, and the policy be near the one that sampled.
        ok = (chosen["trained"] & (chosen["importance"] > 0)).any()
        if config.exact:
            ok &= same_adapter & (difference == 0)  # false for NaN too
        if ppo.max_kl:
            stopped |= sums["policy"].finish()["kl/rollout_k3"] > ppo.max_kl
            ok &= ~stopped
        changes, _ = optimizer.update(grads, moments, params)
        after = optax.apply_updates(params, changes)
        ok &= jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(optax.tree.norm(after))
        norms = group_norms(params)
        sizes = {
            # Of what was zero until now, as a rotation is at first, all has moved: 1.
            name: jnp.where(ok, moved / jnp.maximum(jnp.maximum(norms[name], moved), 1e-12), 0.0)
            for name, moved in group_norms(changes).items()
        }
        # Behind the barrier all of it is made again, instead of being kept until `ok` is known.
        ok, grads, moments, params = lax.optimization_barrier((ok, grads, moments, params))
        changes, moments_after = optimizer.update(grads, moments, params)
        select = functools.partial(jnp.where, ok)
        moments = jax.tree.map(select, moments_after, moments)
        params = jax.tree.map(select, optax.apply_updates(params, changes), params)
        seen = (sums, group_norms(grads), sizes, norms, difference, ok, stopped)
        return (params, moments, stopped), seen

    order = _micro_batch_order(config, state.step, rows.shape[0])
    carry = trainable(state.policy, state.critic), state.optimizer, jnp.bool(False)
    if ppo.updates == 1:
        carry, seen = update(carry, order[0])
        seen = jax.tree.map(lambda x: x[None], seen)
    else:
        carry, seen = lax.scan(update, carry, order)
    params, moments, _ = carry
    sums, gradient_norms, sizes, norms, gaps, applied, stopped = seen
    gap, ok = gaps[0], applied.any()
    critic = state.critic and state.critic.replace(
        adapter=state.critic.adapter.replace(params=params["critic"]["adapter"]),
        head=params["critic"]["head"],
    )
    if state.kl_coefficient is not None:
        measured = measured_kl.sum() / jnp.maximum(mask.sum(), 1)
        next_coefficient = kl.adapted(ppo, kl_coefficient, measured)
        state = state.replace(kl_coefficient=jnp.where(ok, next_coefficient, kl_coefficient))
    state = state.replace(
        policy=state.policy.replace(params=params["policy"]),
        critic=critic,
        optimizer=moments,
        step=state.step + ok,
    )
    sizes = {name: each.sum() for name, each in sizes.items()}
    metrics = {name: value for part in sums.values() for name, value in part.finish().items()}
    metrics |= {
        "parity/max_abs_diff": gap,
        "parity/tokens": mask.sum(),
        "parity/extra_forwards": jnp.int32(ppo.updates > 1 or not config.exact),
        "update/applied": ok.astype(jnp.int32),
        "update/same_adapter": same_adapter.astype(jnp.int32),
        "update/skipped_minibatches": (~applied).sum(),
        "reward/infra_failures": (~finite).sum(),
        "tokens_computed": (rows < batch.stream.num_rows).sum(),
        **{f"gradient_norm/{k}": v.mean() for k, v in gradient_norms.items()},
        **{f"adapter/update_size/{k}": v for k, v in sizes.items()},
        **{f"adapter/norm/{k}": v[-1] for k, v in norms.items()},  # before the last update
        "adapter/update_size": sizes["policy"],
    }
    if ppo.kl in ("reward", "loss"):
        metrics["kl/coefficient"] = kl_coefficient
    if ppo.overlong_filter:
        metrics["update/overlong_tokens"] = (mask & ~trained).sum()
    if ppo.max_kl:
        metrics["update/stopped_by_kl"] = stopped.sum()
    if not config.exact:
        tokens = jnp.maximum(trained.sum(), 1)
        metrics["correction/weight_mean"] = (importance * trained).sum() / tokens
        metrics["correction/dropped"] = (trained & (importance == 0)).sum() / tokens
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


def _micro_batch_order(config: StepConfig, step: jax.Array, micro_batches: int) -> jax.Array:
    """[updates, micro-batches per update]: each epoch visits all, in an order of its own."""
    ppo = config.ppo
    if ppo.epochs * ppo.minibatches == 1:
        return jnp.arange(micro_batches)[None]
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    keys = jax.random.split(key, ppo.epochs)
    orders = jax.vmap(lambda k: jax.random.permutation(k, micro_batches))(keys)
    return orders.reshape(ppo.epochs * ppo.minibatches, -1)
