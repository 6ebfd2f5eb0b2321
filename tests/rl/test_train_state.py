"""What training moves and what it does not: moments for adapters alone, laid out with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lab import Lab

from orbit_jax.checkpoint import run_state
from orbit_jax.config import OptimizerConfig
from orbit_jax.model.config import MeshShape
from orbit_jax.rl.train_state import Critic, TrainState, init_state, make_optimizer, state_specs

RATES = OptimizerConfig(
    learning_rate=0.01, critic_learning_rate=0.1, warmup_steps=3, max_gradient_norm=1e9
)


@pytest.fixture(scope="module")
def state(moe: Lab) -> TrainState:
    policy, critic = moe.adapter(seed=0), moe.adapter(seed=1)
    return init_state(RATES, policy, Critic(critic, jnp.zeros(moe.model.hidden_size)), policy, 0.1)


def test_there_are_two_moments_for_each_trained_number_and_none_for_the_base(state):
    trained = jax.tree.leaves((state.policy.params, state.critic.adapter.params, state.critic.head))
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in trained)
    assert {x.dtype for x in (*moments, *trained)} == {jnp.dtype("float32")}


def test_the_reference_is_a_copy_since_the_state_is_donated(state):
    for ours, copy in zip(
        jax.tree.leaves(state.policy), jax.tree.leaves(state.reference), strict=True
    ):
        np.testing.assert_array_equal(ours, copy)
        assert ours.unsafe_buffer_pointer() != copy.unsafe_buffer_pointer()


def test_a_coefficient_that_is_adapted_is_saved_and_one_that_is_fixed_takes_no_place(
    state, tmp_path
):
    run_state.save(tmp_path, 1, state.replace(kl_coefficient=jnp.float32(0.3)), {}, 1)
    restored, _ = run_state.restore(run_state.latest(tmp_path).path, state)
    assert restored.kl_coefficient == np.float32(0.3)
    fixed = init_state(RATES, state.policy, None)
    assert fixed.kl_coefficient is None


def test_adapters_and_their_moments_lie_in_parts_over_all_devices(state, moe: Lab):
    model = dataclasses.replace(moe.model, mesh=MeshShape(2, 2))
    specs = state_specs(model, state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert specs.kl_coefficient == P()
    experts = specs.policy.params["layers"][0]["mlp"]["experts"]["up_proj"]
    assert P(None, ("data", "tensor"), None, None) in jax.tree.leaves(experts)
    for part, adapter in (("policy", specs.policy), ("critic", specs.critic.adapter)):
        for moment in ("mu", "nu"):
            found = optax.tree.get(specs.optimizer.inner_states[part], moment)[part]
            found = found if part == "policy" else found["adapter"]
            assert jax.tree.leaves(found) == jax.tree.leaves(adapter.params)
    for spec, leaf in zip(
        jax.tree.leaves(specs.policy.params), jax.tree.leaves(state.policy.params), strict=True
    ):
        parts = NamedSharding(AbstractMesh((2, 2), ("data", "tensor")), spec)
        assert np.prod(parts.shard_shape(leaf.shape)) * 4 == leaf.size, (spec, leaf.shape)


def test_the_rate_warms_up_and_each_part_has_its_own():
    params = {"policy": jnp.zeros(2), "critic": jnp.zeros(2)}
    optimizer = make_optimizer(RATES)
    moments, steps = optimizer.init(params), []
    for _ in range(5):
        changes, moments = optimizer.update(jax.tree.map(jnp.ones_like, params), moments, params)
        steps.append([-float(changes[part][0]) for part in ("policy", "critic")])
    warming = np.array([0.25, 0.5, 0.75, 1.0, 1.0])  # a constant gradient moves Adam by the rate
    np.testing.assert_allclose(steps, np.outer(warming, [0.01, 0.1]), rtol=1e-4)
