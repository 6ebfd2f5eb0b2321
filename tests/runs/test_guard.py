"""Which steps stop a run, which are only kept, and which are nobody's business."""

import math

import pytest

from orbit_jax.runs.guard import MOST_IDLE_STEPS, Guard

FINE = {
    "parity/max_abs_diff": 0.0,
    "parity/tokens": 20,
    "update/applied": 1,
    "update/same_adapter": 1,
    "reward/infra_failures": 0,
    "gradient_norm/policy": 0.5,
    "gradient_norm/policy/q_proj": 0.5,
}
IDLE = {"update/applied": 0}
NOT_FINITE = IDLE | {"gradient_norm/policy": math.nan, "gradient_norm/policy/q_proj": math.inf}


def troubles(*steps, recipe="fast"):
    guard = Guard()
    return [guard.trouble(FINE | step, recipe) for step in steps]


def test_a_step_that_was_applied_is_no_trouble():
    assert troubles({}, {}, {}, {}) == [None] * 4


@pytest.mark.parametrize("gap", [1e-7, math.nan])
def test_a_gap_stops_at_once_and_is_kept(gap):
    (trouble,) = troubles(IDLE | {"parity/max_abs_diff": gap})
    assert (trouble.keep, trouble.stop) == (True, True)
    assert f"differ by {gap:g}" in trouble.text


def test_under_corrected_a_gap_is_expected():
    assert troubles({"parity/max_abs_diff": 0.5}, recipe="corrected") == [None]


def test_a_gradient_that_is_not_finite_is_kept_and_named_and_only_a_row_of_them_stops():
    *first, last = troubles(*[NOT_FINITE] * MOST_IDLE_STEPS)
    assert [(t.keep, t.stop) for t in first] == [(True, False)] * (MOST_IDLE_STEPS - 1)
    assert (last.keep, last.stop) == (True, True)
    assert "gradient of policy, policy/q_proj is not finite" in first[0].text
    assert f"no update was made for {MOST_IDLE_STEPS} steps" in last.text
    broken = troubles(NOT_FINITE, NOT_FINITE, {}, NOT_FINITE, NOT_FINITE)
    assert not any(trouble and trouble.stop for trouble in broken)


def test_idle_steps_stop_only_in_a_row_and_have_no_batch_to_look_at():
    found = troubles(IDLE, IDLE, {}, *[IDLE] * MOST_IDLE_STEPS)
    assert found[:-1] == [None] * (len(found) - 1)
    assert (found[-1].keep, found[-1].stop) == (False, True)


def test_one_of_several_minibatches_that_is_not_finite_is_kept_too():
    (trouble,) = troubles({"gradient_norm/policy": math.nan})  # others were applied
    assert (trouble.keep, trouble.stop) == (True, False)
