"""What training moves: the policy's adapter, the critic's, and the optimiser's moments."""

import math

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.config import OptimizerConfig
from orbit_jax.model.config import ModelConfig


@struct.dataclass
class Critic:
    """A second adapter on the same frozen base, and a scalar head `[D]` on its hidden states."""

    adapter: Adapter
    head: jax.Array


@struct.dataclass
class TrainState:
    """All that training moves.

    `reference` is a frozen adapter, or None when the base is it; `kl_coefficient` an f32 scalar, or
    None where the config's is kept.
    """

    policy: Adapter
    critic: Critic | None
    reference: Adapter | None
    optimizer: optax.OptState
    step: jax.Array
    kl_coefficient: jax.Array | None = None


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with linear warm-up; policy and critic are clipped and scaled apart."""

    def adamw(rate: float) -> optax.GradientTransformation:
        first = rate / (config.warmup_steps + 1)
        schedule = optax.linear_schedule(first, rate, config.warmup_steps)
        return optax.chain(
            optax.clip_by_global_norm(config.max_gradient_norm),
            optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay),
        )

    parts = {"policy": adamw(config.learning_rate), "critic": adamw(config.critic_learning_rate)}
    return optax.partition(parts, lambda params: {k: k for k in params})


def init_state(
    config: OptimizerConfig,
    policy: Adapter,
    critic: Critic | None,
    reference: Adapter | None = None,
    kl_coefficient: float | None = None,
) -> TrainState:
    """A fresh state: f32 masters and zero moments; the base has neither.

    The reference may be the policy as it stands: it is copied, since the state is donated. With a
    `kl_coefficient` the steps adapt it, from there on.
    """
    optimizer = make_optimizer(config).init(trainable(policy, critic))
    reference = jax.tree.map(jnp.copy, reference)
    adapted = None if kl_coefficient is None else jnp.float32(kl_coefficient)
    return TrainState(policy, critic, reference, optimizer, jnp.int32(0), adapted)


def state_specs(config: ModelConfig, state: TrainState) -> TrainState:
    """Where the state lies on a mesh: adapters and their moments in parts over all devices."""
    policy = mesh.stored_specs(config.mesh, state.policy)
    params, critic = {"policy": policy.params}, None
    if state.critic is not None:
        critic = Critic(mesh.stored_specs(config.mesh, state.critic.adapter), P())
        params["critic"] = {"adapter": critic.adapter.params, "head": critic.head}

    # Moments have the parameters' tree paths at the end of their own.
    by_path = {_names(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(params)}

    def of_moment(path: tuple, _: jax.Array) -> P:
        names = _names(path)
        return next((by_path[names[i:]] for i in range(len(names)) if names[i:] in by_path), P())

    return TrainState(
        policy=policy,
        critic=critic,
        reference=mesh.stored_specs(config.mesh, state.reference),
        optimizer=jax.tree_util.tree_map_with_path(of_moment, state.optimizer),
        step=P(),
        kl_coefficient=None if state.kl_coefficient is None else P(),
    )


def trainable(policy: Adapter, critic: Critic | None) -> dict:
    """The parameters that gradients and moments are of."""
    params = {"policy": policy.params}
    if critic is not None:
        params["critic"] = {"adapter": critic.adapter.params, "head": critic.head}
    return params


def trained_parameters(state: TrainState) -> int:
    """Of policy and critic together."""
    leaves = jax.tree.leaves(trainable(state.policy, state.critic))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _names(path: tuple) -> tuple:
    """A tree path as plain dictionary keys and list indices."""
    keys = (getattr(k, "key", getattr(k, "idx", None)) for k in path)
    return tuple(k for k in keys if k is not None)
