import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.model.head import log_softmax_at
from orbit_jax.rl import losses
from orbit_jax.rl.aggregation import token_weights
from orbit_jax.rl.losses import Tokens

LOGITS = jnp.array([[2.0, 1.0, 0.0]])


@functools.partial(jax.jit, static_argnames=("config", "name"))
def graded(config: PPOConfig, name: str, x: Tokens) -> tuple:
    """Losses of all tokens, the gradient of their sum by the log-probs, and the metrics."""

    def total(logprobs):
        loss, metrics = losses.LOSSES[name](config, x.replace(logprobs=logprobs))
        return loss.sum(), (loss, metrics)

    gradient, (loss, metrics) = jax.grad(total, has_aux=True)(x.logprobs)
    return loss, gradient, metrics


def tokens(log_ratios: list, advantages: list, rows: list | None = None, **given) -> Tokens:
    """Tokens of one row, all of old log-prob -1, unless told otherwise."""
    rows = np.int32([0] * len(log_ratios) if rows is None else rows)
    old = np.full(len(rows), -1, np.float32)
    fields = {"mask": rows < rows.max() + 1, "num_rows": int(rows.max()) + 1} | given
    logprobs = old + np.float32(log_ratios)
    return Tokens(logprobs, old, np.float32(advantages), rows=rows, **fields)


def one(name: str, ratio: float, advantage: float, **config) -> tuple[float, float, dict]:
    """Loss of one token, its derivative by the log-prob, and the metrics."""
    config = PPOConfig(**{"clip_low": 0.2, "clip_high": 0.28} | config)
    loss, slope, metrics = graded(config, name, tokens([np.log(ratio)], [advantage]))
    return loss.item(), slope.item(), {k: v.item() for k, v in metrics.items()}


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
    value, gradient, metrics = one("ppo_clip", ratio, advantage)
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
    value, gradient, metrics = one("ppo_clip", ratio, advantage, dual_clip=3.0)
    assert value == pytest.approx(loss, rel=1e-6)
    assert gradient == pytest.approx(slope, rel=1e-6)
    assert metrics["dual_clip_fraction"] == bounded


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("difference", [-1000.0, 1000.0])
def test_losses_stay_finite_for_any_ratio(name, difference):
    for advantage in (-1.0, 1.0):
        loss, slope, _ = graded(PPOConfig(), name, tokens([difference], [advantage]))
        assert np.isfinite([loss, slope]).all()


@pytest.mark.parametrize("name", losses.LOSSES)
def test_at_ratio_one_every_loss_has_the_gradient_of_the_policy_gradient(name):
    """That is the first update of a batch: they differ only from the second on."""
    advantages = [1.5, 1.5, -0.5, -0.5, -0.5]
    _, gradient, metrics = graded(
        PPOConfig(), name, tokens([0.0] * 5, advantages, rows=[0, 0, 1, 1, 1])
    )
    np.testing.assert_allclose(gradient, -np.float32(advantages))
    assert not np.any(metrics.get("clip_fraction", 0))


def test_the_policy_gradient_is_never_clipped():
    assert one("policy_gradient", 3.0, 2.0) == (pytest.approx(-6), pytest.approx(-6), {})
    assert one("policy_gradient", 0.1, -2.0) == (pytest.approx(0.2), pytest.approx(0.2), {})


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.0, 2.0, 1.0, 0), (3.0, 2.0, 1.28, 1), (3.0, -2.0, 1.28, 1), (0.1, -2.0, 0.8, 1)],
)
def test_cispo_clips_the_weight_of_a_token_and_keeps_its_gradient(
    ratio, advantage, weight, clipped
):
    loss, slope, metrics = one("cispo", ratio, advantage)
    assert loss == pytest.approx(-weight * advantage * (np.log(ratio) - 1), rel=1e-5)
    assert slope == pytest.approx(-weight * advantage, rel=1e-6)
    assert metrics == {"clip_fraction": clipped}


def test_gspo_has_the_gradient_of_the_papers_sequence_objective():
    """Rows of 3, 1 and 4 tokens, two of them not sampled; one row is beyond the clip."""
    rng = np.random.default_rng(0)
    rows = np.int32([0, 0, 0, 1, 2, 2, 2, 2, 3])  # the last is padding
    mask = np.array([1, 0, 1, 1, 1, 1, 0, 1, 0], bool)
    per_row = np.float32([1.0, -2.0, 0.5, 0.0])
    config = PPOConfig(clip_low=0.05, clip_high=0.05)
    x = tokens(
        np.where(mask, 0.3 * rng.standard_normal(9), 0), per_row[rows], rows, mask=mask, num_rows=3
    )

    def paper(logprobs):
        """The mean over rows of `min(s A, clip(s) A)`, with `s` as a power of the likelihoods."""
        total = 0.0
        for row in range(3):
            on = np.flatnonzero(mask & (rows == row))
            likelihood = jnp.prod(jnp.exp(logprobs[on])) / jnp.prod(jnp.exp(x.old_logprobs[on]))
            s = likelihood ** (1 / len(on))
            total += jnp.minimum(s * per_row[row], jnp.clip(s, 0.95, 1.05) * per_row[row])
        return -total / 3

    def ours(logprobs):
        loss, _ = losses.gspo(config, x.replace(logprobs=logprobs))
        weights = token_weights("sequence_mean", mask[None], rows[None], 3, 4)[0]
        return (loss * weights).sum()

    value, gradient = jax.value_and_grad(paper)(x.logprobs)
    found, ours_gradient = jax.value_and_grad(ours)(x.logprobs)
    assert found == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(ours_gradient, gradient, atol=1e-7)
    assert np.count_nonzero(gradient) < mask.sum()  # a row was clipped


def test_means_of_rows_look_at_their_own_tokens_under_the_mask_alone():
    values = jnp.float32([1, 50, 3, 7, 9, np.nan])
    x = tokens(np.zeros(6), np.zeros(6), [0, 0, 0, 1, 1, 2], num_rows=2)
    x = x.replace(mask=np.array([1, 0, 1, 1, 1, 0], bool))
    np.testing.assert_array_equal(x.row_sum(values), [4, 4, 4, 16, 16, 0])
    np.testing.assert_array_equal(x.row_mean(values), [2, 2, 2, 8, 8, 0])
