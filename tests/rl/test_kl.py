"""Estimates of a KL, its gradient in the loss, and its coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.rl.kl import ESTIMATORS, adapted, in_loss, k1, k2, k3

REFERENCE = jax.nn.log_softmax(jnp.array([0.3, -1.9]))
THETA = jnp.array([-0.5, 0.4])


def test_k3_has_its_known_values_and_is_never_negative():
    # The argument of k3 in the papers is log q - log p.
    assert k3(0.0, -0.1) == pytest.approx(0.0048, abs=5e-5)
    assert k3(0.0, 0.1) == pytest.approx(0.0052, abs=5e-5)
    assert (k3(jnp.linspace(-5, 5, 101), 0.0) >= 0).all()
    assert k3(jnp.float32(-3.25), jnp.float32(-3.25)) == 0


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("delta", [-100.0, 100.0])
def test_kl_estimators_and_their_gradients_stay_finite(name, delta):
    for estimate in (ESTIMATORS[name], lambda p, q: in_loss(name, p, q)):
        assert all(np.isfinite(jax.value_and_grad(estimate)(delta, 0.0)))


def expected(estimate) -> tuple:
    """Value and gradient on a two-armed bandit: exact sums over both arms."""

    def of(theta: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(theta)
        drawn = jax.lax.stop_gradient(jnp.exp(logp))  # tokens come from p; p is not moved
        return (drawn * estimate(logp, REFERENCE)).sum()

    return jax.jit(jax.value_and_grad(of))(THETA)


def exact(forward: bool) -> tuple:
    """KL(p || q) and its gradient by p, or KL(q || p)."""

    def of(theta: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(theta)
        p, q = (logp, REFERENCE) if forward else (REFERENCE, logp)
        return (jnp.exp(p) * (p - q)).sum()

    return jax.jit(jax.value_and_grad(of))(THETA)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_in_the_loss_each_estimator_has_its_value_and_the_exact_gradient(name):
    value, gradient = expected(lambda p, q: in_loss(name, p, q))
    assert value == pytest.approx(float(expected(ESTIMATORS[name])[0]), rel=1e-6)
    np.testing.assert_allclose(gradient, exact(forward=True)[1], rtol=1e-5)


def test_by_themselves_k1_and_k3_have_another_gradient():
    """The traps that `in_loss` avoids: both are right as values, not as losses."""
    (value, gradient), (_, of_reverse) = exact(forward=True), exact(forward=False)
    assert np.abs(gradient - of_reverse).max() > 0.02  # the bandit tells them apart
    for estimate in (k1, k3):
        assert expected(estimate)[0] == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(expected(k1)[1], [0, 0], atol=1e-6)
    np.testing.assert_allclose(expected(k3)[1], of_reverse, rtol=1e-5)
    np.testing.assert_allclose(expected(k2)[1], gradient, rtol=1e-5)


def test_taken_from_the_reward_k1_alone_has_the_exact_gradient():
    """There the gradient is that of log p, times the estimate as it stands."""

    def by_policy_gradient(estimate):
        return expected(lambda p, q: p * jax.lax.stop_gradient(estimate(p, q)))[1]

    gradient = exact(forward=True)[1]
    np.testing.assert_allclose(by_policy_gradient(k1), gradient, rtol=1e-5)
    for estimate in (k2, k3):
        assert np.abs(by_policy_gradient(estimate) - gradient).max() > 0.02


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(0.1, 1.0), (0.11, 1.01), (0.09, 0.99), (5.0, 1.02), (0.0, 0.98), (-3.0, 0.98)],
)
def test_the_coefficient_follows_the_measured_kl_within_a_fifth(measured, factor):
    config = PPOConfig(kl="loss", kl_coefficient=0.5, kl_target=0.1, kl_horizon=10.0)
    assert adapted(config, 0.5, measured) == pytest.approx(0.5 * factor, rel=1e-5)
