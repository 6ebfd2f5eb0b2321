import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.model.head import log_softmax_at
from orbit_jax.rl.losses import k1, k3, kl_in_loss, ppo_clip

graded_clip = jax.jit(
    jax.value_and_grad(ppo_clip, argnums=1, has_aux=True), static_argnames="config"
)
LOGITS = jnp.array([[2.0, 1.0, 0.0]])


def clip(ratio: float, advantage: float, **config) -> tuple[float, float, dict]:
    """Loss of one token, its derivative by the log-prob, and the metrics."""
    config = PPOConfig(clip_low=0.2, clip_high=0.28, **config)
    (value, metrics), slope = graded_clip(config, np.log(ratio), 0.0, advantage)
    return float(value), float(slope), {k: float(v) for k, v in metrics.items()}


def test_temperature_divides_logits():
    at_half = [log_softmax_at(LOGITS, jnp.array([t]), jnp.array([0.5]))[0].item() for t in range(3)]
    np.testing.assert_allclose(at_half, [-0.1429, -2.1429, -4.1429], atol=5e-5)


def test_entropy_is_that_of_the_tempered_distribution():
    p = np.exp([4.0, 2.0, 0.0])
    p /= p.sum()
    _, entropy = log_softmax_at(LOGITS, jnp.array([0]), jnp.array([0.5]))
    np.testing.assert_allclose(entropy[0], -(p * np.log(p)).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.25, 1.0, -1.25, -1.25, 0),  # beyond 1 + clip_low: the two clips differ
        (1.5, 1.0, -1.28, 0.0, 1),
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        (1.5, -1.0, 1.5, 1.5, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_the_two_clips_cut_where_an_update_would_go_too_far(ratio, advantage, loss, slope, clipped):
    value, gradient, metrics = clip(ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-6)
    assert gradient == pytest.approx(slope, rel=1e-6)
    assert metrics == {"clip_fraction": clipped}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bounded"),
    [
        (5.0, -2.0, 6.0, 0.0, 1),  # 3 * 2, not 5 * 2
        (2.5, -2.0, 5.0, 5.0, 0),
        (5.0, 2.0, -2.56, 0.0, 0),  # a positive advantage knows only the plain clip
        (0.1, -2.0, 1.6, 0.0, 0),
    ],
)
def test_dual_clip_bounds_the_loss_of_a_negative_advantage(ratio, advantage, loss, slope, bounded):
    value, gradient, metrics = clip(ratio, advantage, dual_clip=3.0)
    assert value == pytest.approx(loss, rel=1e-6)
    assert gradient == pytest.approx(slope, rel=1e-6)
    assert metrics["dual_clip_fraction"] == bounded


@pytest.mark.parametrize("difference", [-1000.0, 1000.0])
def test_the_clipped_loss_stays_finite_for_any_ratio(difference):
    for advantage in (-1.0, 1.0):
        (value, _), slope = graded_clip(PPOConfig(), difference, 0.0, advantage)
        assert np.isfinite([value, slope]).all()


def test_k3_has_its_known_values_and_is_never_negative():
    # The argument of k3 in the papers is log q - log p.
    assert k3(0.0, -0.1) == pytest.approx(0.0048, abs=5e-5)
    assert k3(0.0, 0.1) == pytest.approx(0.0052, abs=5e-5)
    assert (k3(jnp.linspace(-5, 5, 101), 0.0) >= 0).all()
    assert k3(jnp.float32(-3.25), jnp.float32(-3.25)) == 0


@pytest.mark.parametrize("estimator", [k1, k3, kl_in_loss])
@pytest.mark.parametrize("delta", [-100.0, 100.0])
def test_kl_estimators_and_their_gradients_stay_finite(estimator, delta):
    assert all(np.isfinite(jax.value_and_grad(estimator)(delta, 0.0)))


def test_kl_in_loss_has_the_exact_gradient_on_a_two_armed_bandit():
    """Expectations are exact sums over both arms, so nothing but the estimator can differ."""
    reference = jax.nn.log_softmax(jnp.array([0.3, -1.9]))
    theta = jnp.array([-0.5, 0.4])

    def expected(estimator):
        def of(theta: jax.Array) -> jax.Array:
            logp = jax.nn.log_softmax(theta)
            drawn = jax.lax.stop_gradient(jnp.exp(logp))  # tokens come from p; p is not moved
            return (drawn * estimator(logp, reference)).sum()

        return jax.jit(jax.value_and_grad(of))(theta)

    def exact(forward: bool):
        def of(theta: jax.Array) -> jax.Array:
            logp = jax.nn.log_softmax(theta)
            p, q = (logp, reference) if forward else (reference, logp)
            return (jnp.exp(p) * (p - q)).sum()

        return jax.jit(jax.value_and_grad(of))(theta)

    (kl, gradient), (_, gradient_of_reverse) = exact(True), exact(False)
    assert np.abs(gradient - gradient_of_reverse).max() > 0.02  # the bandit tells them apart
    for estimator in (k1, k3, kl_in_loss):
        np.testing.assert_allclose(expected(estimator)[0], kl, rtol=1e-5)
    np.testing.assert_allclose(expected(kl_in_loss)[1], gradient, rtol=1e-5)
    # The trap that kl_in_loss avoids: k3 is right as a value, not as a loss.
    np.testing.assert_allclose(expected(k3)[1], gradient_of_reverse, rtol=1e-5)
