from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.config import PPOConfig
from orbit_jax.rl import advantages
from orbit_jax.rl.advantages import Experience

of_stream = jax.jit(advantages.generalised_advantages)
FUNCTIONS = {k: jax.jit(f, static_argnums=0) for k, f in advantages.ADVANTAGES.items()}
gae, grpo, dr_grpo = (FUNCTIONS[name] for name in ("gae", "grpo", "dr_grpo"))
PLAIN = PPOConfig(whiten=False, gamma=1.0, lam=1.0)


def experience(rows: list, rewards: list, mask: list | None = None, **given) -> Experience:
    """One micro-batch of rows in a stream; what is not given is neutral."""
    n, r = len(rows), len(rewards)
    rewards = np.array(rewards, np.float32)
    counted = np.isfinite(rewards)
    fields = {
        "mask": np.ones(n, bool) if mask is None else np.array(mask, bool),
        "rows": np.array(rows, np.int32),
        "rewards": np.where(counted, rewards, 0),
        "counted": counted,
        "groups": np.zeros(r, np.int32),
        "truncated": np.zeros(r, bool),
        "penalty": np.zeros(n, np.float32),
        "values": np.zeros(n, np.float32),
        "last_values": np.zeros(r, np.float32),
    } | {k: np.array(v) for k, v in given.items()}
    return Experience(**{k: jnp.asarray(v)[None] for k, v in fields.items()}, num_groups=r)


def group_advantages(
    rewards: list, groups: Sequence[int] = (), name: str = "grpo", **config
) -> np.ndarray:
    """The advantage of each row, of one token each."""
    groups = groups if len(groups) else [0] * len(rewards)
    x = experience(range(len(rewards)), rewards, groups=np.array(groups, np.int32))
    return np.asarray(FUNCTIONS[name](PPOConfig(**config), x)[0][0])


def loop_gae(rewards, values, mask, rows, after, gamma, lam) -> np.ndarray:
    """The textbook recursion over the tokens under the mask, row by row, in f64."""
    out = np.zeros(len(rows))
    for row in range(len(after)):
        places = [i for i in range(len(rows)) if rows[i] == row and mask[i]]
        next_value, advantage = after[row], 0.0
        for i in reversed(places):
            advantage = rewards[i] + gamma * next_value - values[i] + gamma * lam * advantage
            out[i], next_value = advantage, values[i]
    return out


def random_stream(seed: int) -> tuple:
    """40 tokens: rows of random lengths, some empty, padding behind, and a random mask."""
    rng = np.random.default_rng(seed)
    rows = np.full(40, 5, np.int32)
    filled = np.repeat(np.arange(5), rng.integers(0, 8, 5))
    rows[: len(filled)] = filled
    mask = (rng.random(len(rows)) < 0.6) & (rows < 5)
    draw = lambda n: rng.standard_normal(n).astype(np.float32)  # noqa: E731
    return draw(len(rows)), draw(len(rows)), mask, rows, draw(5), rng


# L1, L2: returns


def test_returns_skip_masked_tokens():
    x = experience([0, 0, 0], [1.0], mask=[1, 0, 1])
    _, returns = gae(PPOConfig(whiten=False, gamma=0.5, lam=1.0), x)
    np.testing.assert_allclose(returns[0, [0, 2]], [0.5, 1.0])
    assert not np.allclose(returns[0, 0], 0.25)  # had the tool token cost a step


@pytest.mark.parametrize("seed", range(10))
def test_deleting_masked_tokens_changes_nothing(seed):
    rewards, values, mask, rows, after, _ = random_stream(seed)
    full = of_stream(rewards, values, mask, rows, after, 0.9, 0.8)
    keep = np.argsort(~mask, kind="stable")  # the others move behind, as padding
    rows = np.where(mask, rows, 5)
    kept = of_stream(rewards[keep], values[keep], mask[keep], rows[keep], after, 0.9, 0.8)
    np.testing.assert_array_equal(full[mask], kept[: mask.sum()])


@pytest.mark.parametrize("seed", range(20))
def test_gae_equals_a_loop(seed):
    rewards, values, mask, rows, after, rng = random_stream(seed)
    gamma, lam = rng.random(2)
    values[~mask], rewards[~mask] = np.nan, np.inf  # never read
    expected = loop_gae(rewards, values, mask, rows, after, gamma, lam)
    found = of_stream(rewards, values, mask, rows, after, gamma, lam)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bootstrap", "expected"), [(True, [1.0, 1.0]), (False, [-1.0, -1.0])])
def test_a_truncated_row_goes_on_with_the_last_value_or_ends(bootstrap, expected):
    config = PPOConfig(whiten=False, gamma=1.0, lam=1.0, bootstrap_truncated=bootstrap)
    x = experience([0, 0], [0.0], values=[1.0, 1.0], last_values=[2.0], truncated=[True])
    np.testing.assert_allclose(gae(config, x)[0][0], expected)


def test_a_finished_row_never_bootstraps():
    config = PPOConfig(whiten=False, bootstrap_truncated=True)
    x = experience([0, 0], [0.0], values=[1.0, 1.0], last_values=[2.0])
    np.testing.assert_allclose(gae(config, x)[0][0], [-1.0, -1.0])


def test_the_reward_stands_at_the_last_token_under_the_mask():
    x = experience([0, 0, 0, 1, 1, 2], [1.0, 10.0, 5.0], mask=[1, 1, 0, 0, 1, 0])
    _, returns = gae(PPOConfig(whiten=False, gamma=0.5), x)
    np.testing.assert_allclose(returns[0], [0.5, 1.0, 0.0, 0.0, 10.0, 0.0])


def test_values_are_taken_before_their_token():
    """A critic that knows the reward from the second token on: only the first is surprised."""
    x = experience([0, 0, 0], [1.0], values=[0.0, 1.0, 1.0])
    advantages, returns = gae(PPOConfig(whiten=False, lam=0.0), x)
    np.testing.assert_allclose(advantages[0], [1.0, 0.0, 0.0])
    np.testing.assert_allclose(returns[0], [1.0, 1.0, 1.0])


def test_whitening_looks_at_tokens_under_the_mask_alone():
    rewards, values, mask, rows, _, _ = random_stream(3)
    x = experience(rows, rewards[:5], mask=mask, values=values)
    advantages = np.asarray(gae(PPOConfig(whiten=True), x)[0])[0]
    plain = np.asarray(gae(PLAIN, x)[0])[0]
    assert advantages[mask].mean() == pytest.approx(0, abs=1e-6)
    assert advantages[mask].std() == pytest.approx(1, rel=1e-5)
    expected = (plain[mask] - plain[mask].mean()) / plain[mask].std()
    np.testing.assert_allclose(advantages[mask], expected, rtol=1e-4, atol=1e-5)


def test_whitening_a_fully_masked_batch_is_finite():
    x = experience([0, 0], [np.nan], mask=[0, 0])
    assert np.isfinite(gae(PPOConfig(), x)[0]).all()


def test_the_penalty_lowers_the_reward_of_its_token():
    x = experience([0, 0, 0], [1.0], mask=[1, 0, 1], penalty=[0.25, 9.0, 0.5])
    _, returns = gae(PLAIN, x)
    np.testing.assert_allclose(returns[0, [0, 2]], [0.25, 0.5])


# L3: groups


def test_a_group_without_variance_has_advantage_exactly_zero():
    assert (group_advantages([1.0, 1.0, 1.0, 1.0]) == 0).all()


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -2.3, 1e4 / 3])
def test_equal_rewards_are_exactly_zero_though_their_mean_is_rounded(reward):
    groups = np.repeat(range(6), [2, 3, 4, 5, 6, 7])
    assert (group_advantages([reward] * 27, groups) == 0).all()


def test_a_failed_reward_stands_aside_and_leaves_its_group_alone():
    found = group_advantages([1.0, np.nan, 0.0, 1.0])
    np.testing.assert_allclose(found, [0.57735, 0.0, -1.15470, 0.57735], atol=1e-5)
    np.testing.assert_allclose(found[[0, 2, 3]], group_advantages([1.0, 0.0, 1.0]), rtol=1e-6)


def test_a_failed_reward_beside_equal_ones_is_still_no_variance():
    assert (group_advantages([0.7, np.nan, 0.7, 0.7]) == 0).all()


def test_groups_do_not_see_each_other_and_may_be_interleaved():
    found = group_advantages([1.0, 5.0, 0.0, 5.0], groups=[2, 0, 2, 0])
    np.testing.assert_allclose(found, [0.70711, 0.0, -0.70711, 0.0], atol=1e-5)


def test_without_scaling_the_advantage_is_the_difference_from_the_mean():
    np.testing.assert_allclose(
        group_advantages([1.0, 0.0, 0.0, 0.0], name="dr_grpo"), [0.75, -0.25, -0.25, -0.25]
    )


def test_the_floor_of_the_deviation_keeps_nearly_equal_rewards_small():
    found = group_advantages([1.0, 1.0 + 1e-5], std_floor=1e-2)
    assert np.abs(found).max() < 1e-3


def test_a_group_of_one_row_that_counts_is_zero():
    assert (group_advantages([np.nan, 3.0]) == 0).all()


def test_a_row_gives_its_advantage_to_each_of_its_tokens_and_padding_has_none():
    x = experience([1, 1, 0, 0, 0, 2, 2], [1.0, 0.0])
    found = dr_grpo(PPOConfig(), x)[0][0]
    np.testing.assert_allclose(found, [-0.5, -0.5, 0.5, 0.5, 0.5, 0.0, 0.0])


def test_the_penalty_of_tokens_under_the_mask_lowers_the_score_of_a_row():
    x = experience([0, 0, 1], [1.0, 1.0], mask=[1, 0, 1], penalty=[0.5, 9.0, 0.0])
    found = dr_grpo(PPOConfig(), x)[0][0]
    np.testing.assert_allclose(found, [-0.25, -0.25, 0.25])


def test_groups_reach_across_micro_batches():
    whole = experience([0, 1, 2, 3], [1.0, 0.0, 1.0, 1.0])
    split = Experience(
        **{
            k: getattr(whole, k).reshape(2, 2)
            for k in ("mask", "rewards", "counted", "groups", "truncated", "penalty", "values")
        },
        rows=jnp.array([[0, 1], [0, 1]]),
        last_values=jnp.zeros((2, 2)),
        num_groups=4,
    )
    config = PPOConfig()
    np.testing.assert_array_equal(grpo(config, split)[0].reshape(-1), grpo(config, whole)[0][0])


# The others, against numbers computed by hand

GROUPS = [0, 0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.0, 0.0, 3.0, np.nan, 5.0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5, -0.70711, 0, 0.70711]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, -1, 0, 1]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, -2, 0, 2]),  # 1 - 0, 0 - 1/3, 3 - 5, 5 - 3
        ("reinforce", [-0.5, -1.5, -1.5, -1.5, 1.5, 0, 3.5]),  # 9 / 6 is the mean
        # Squares of dr_grpo's sum up to 2.75; by 6 rows of a token, and the root: 0.67700.
        ("reinforce_pp_baseline", np.array([0.75, -0.25, -0.25, -0.25, -1, 0, 1]) / 0.67700),
        # Those of reinforce: 21.5; by 6, and the root: 1.89297.
        ("reinforce_pp", np.array([-0.5, -1.5, -1.5, -1.5, 1.5, 0, 3.5]) / 1.89297),
    ],
)
def test_advantages_have_their_papers_values_and_a_failed_reward_touches_none(name, wanted):
    mask = np.isfinite(REWARDS)
    x = experience(range(7), REWARDS, mask=mask, groups=np.int32(GROUPS))
    found, returns = FUNCTIONS[name](PPOConfig(), x)
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
    assert not returns.any()
    others = [row for row in range(7) if row != 5]
    x = experience(range(6), np.take(REWARDS, others), groups=np.take(GROUPS, others))
    np.testing.assert_allclose(
        FUNCTIONS[name](PPOConfig(), x)[0][0], found[0][np.array(others)], rtol=1e-5
    )


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
@pytest.mark.parametrize("reward", [0.7, 1 / 3, -2.3])
def test_equal_rewards_of_all_rows_have_no_advantage(name, reward):
    x = experience([0, 0, 0, 1, 2, 2, 2], [reward] * 3)
    assert not FUNCTIONS[name](PPOConfig(), x)[0].any()


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_a_batch_without_a_reward_is_finite(name):
    x = experience([0, 0, 1], [np.nan, np.nan], mask=[0, 0, 0])
    assert np.isfinite(FUNCTIONS[name](PPOConfig(), x)[0]).all()


def test_reinforce_pp_gives_each_token_what_is_still_to_come():
    """A row of 3 tokens with a reward of 1 and costs of 0.5 and 0.25, a row of 1 token with 0."""
    x = experience(
        [0, 0, 0, 0, 1], [1.0, 0.0], mask=[1, 0, 1, 1, 1], penalty=[0.5, 9.0, 0.25, 0, 0]
    )
    to_go = np.array([0.5 * (0.5 * 1 - 0.25) - 0.5, 0.5 * 1 - 0.25, 1, 0])
    wanted = (to_go - to_go.mean()) / to_go.std()
    found = FUNCTIONS["reinforce_pp"](PPOConfig(gamma=0.5), x)[0][0]
    np.testing.assert_allclose(found[np.array([0, 2, 3, 4])], wanted, rtol=1e-5)


def test_reinforce_pp_standardises_over_tokens_so_that_long_rows_weigh_more():
    x = experience([0, 0, 0, 1], [1.0, 0.0])
    found = FUNCTIONS["reinforce_pp_baseline"](PPOConfig(), x)[0][0]
    np.testing.assert_allclose(found, [0.57735, 0.57735, 0.57735, -1.73205], atol=1e-5)


@pytest.mark.parametrize("name", sorted(advantages.ADVANTAGES.keys() - {"gae", "reinforce_pp"}))
def test_what_tokens_cost_lowers_the_score_of_their_row(name):
    """As if it had been taken from the reward."""
    costs = experience([0, 0, 1, 2, 3], [1.0, 0.0, 1.0, 0.0], penalty=[0.1, 0.2, 0.3, 0.0, 0.4])
    lower = experience([0, 0, 1, 2, 3], [0.7, -0.3, 1.0, -0.4])
    found, wanted = (FUNCTIONS[name](PPOConfig(), x)[0] for x in (costs, lower))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
