"""What makes each rule speak, and what keeps it silent."""

import re
from pathlib import Path

import pytest

from orbit_jax.alerts_config import AlertsConfig
from orbit_jax.runs.alert_rules import RULES, WINDOW, Seen
from orbit_jax.runs.files import read_rows

DATA = Path(__file__).parent / "data"
GRADE, LENGTH = "reward/correctness", "completion/length_mean"
LOAD, UNUSED = "router/load_max_over_mean", "router/unused_experts"
MOVED = "adapter/update_size/policy"
Part = tuple[int, dict]  # so many steps with these metrics


def seen(*parts: Part) -> Seen:
    metrics = [one for steps, one in parts for _ in range(steps)]
    rows = [{"step": step, **one} for step, one in enumerate(metrics, 1)]
    return Seen(rows[:WINDOW], rows)


def noisy(mean: float, steps: int, rise: float = 0.0) -> list[Part]:
    """Rewards around a mean that rises by `rise` in all."""
    values = [mean + rise * i / steps + 0.05 * (-1) ** i for i in range(steps)]
    return [(1, {"reward/mean": value, GRADE: 0.4}) for value in values]


def ended(**counts: int) -> dict:
    return {f"outcome/{name}": count for name, count in counts.items()}


def gpu(**facts: float) -> dict:
    """What GPU 3 tells; GPU 0 tells of what is 0 alone."""
    return {f"hardware/gpu{n}/{name}": v for n in (0, 3) for name, v in facts.items() if n or not v}


# By rule: a word of the sentence, and the run that it is told of.
FIRE = [
    ("log_prob_gap", "differ by 0.25", [(1, {"parity/max_abs_diff": 0.25})]),
    ("log_prob_gap", "differ by NaN", [(1, {"parity/max_abs_diff": None})]),
    ("not_finite", "2 metrics .*loss/policy", [(1, {"loss/policy": None, "entropy": None})]),
    ("skipped_update", "^2 updates", [(1, {"update/skipped_minibatches": 2})]),
    (
        "entropy_collapse",
        "entropy is 0.01, 2.0% of the 0.5 .* stays at 0.40",
        [(10, {"entropy": 0.5, GRADE: 0.4}), (20, {"entropy": 0.01, GRADE: 0.4})],
    ),
    (
        "length_runaway",
        "400 tokens, 4.0 times the 100",
        [(10, {LENGTH: 100, GRADE: 0.4}), (10, {LENGTH: 400, GRADE: 0.4})],
    ),
    ("truncation", "60% of completions were cut", [(20, {"stop/length": 0.6})]),
    ("router_collapse", "7.0 times the mean load, 3.0", [(10, {LOAD: 3}), (10, {LOAD: 7})]),
    ("router_collapse", "9 experts get no", [(10, {UNUSED: 2}), (10, {UNUSED: 9})]),
    (
        "dead_adapter",
        "of policy/up_proj has not moved in 10 steps",
        [(10, {f"{MOVED}/up_proj": 0.0, f"{MOVED}/q_proj": 0.01})],
    ),
    (
        "reward_stuck",
        "100% of groups had equal rewards",
        [(10, {"reward/flat_groups": 1, GRADE: 0.0, "gradient_norm/policy": 0.0})],
    ),
    ("reward_stuck", "is 0.400 over the last 100 steps and was 0.400", noisy(0.4, 200)),
    ("kl_runaway", "by a KL of 0.3 a token from what sampled", [(1, {"kl/rollout_k3": 0.3})]),
    ("kl_runaway", "to the reference is 2 a token", [(1, {"kl/reference_k3": 2.0})]),
    ("infra_failures", "10% .* 1 steps", [(1, ended(scored=9, infra_failure=1))]),
    ("memory", "97% of a device", [(1, {"hardware/device_memory_peak_share": 0.97})]),
    ("memory", "98% of the host's", [(1, {"hardware/host_memory_share": 0.98})]),
    ("disk", "0.5 GB are free", [(1, {"hardware/disk_free_gb": 0.5})]),
    ("gpu_errors", "GPU 3 has had 2 memory errors", [(1, gpu(ecc_uncorrected=2))]),
    ("gpu_errors", r"GPU 3 reported Xid 79 \(it has fallen off the bus\)", [(1, gpu(xid=79))]),
    ("gpu_errors", r"Xid 999 \(look it up", [(1, gpu(xid=999))]),
    ("gpu_throttling", r"GPU 3 \(heat, by the hardware\)", [(1, gpu(throttle_reasons=0x44))]),
    ("gpu_temperature", "GPU 3 has 91 °C, above 87", [(1, gpu(celsius=91))]),
]
SILENT = [
    ("log_prob_gap", "equal", [(1, {"parity/max_abs_diff": 0.0})]),
    (
        "log_prob_gap",
        "corrected for",
        [(1, {"parity/max_abs_diff": 0.25, "correction/weight_mean": 1.0})],
    ),
    ("not_finite", "finite", [(1, {"loss/policy": 0.0})]),
    ("skipped_update", "made", [(1, {"update/skipped_minibatches": 0})]),
    (
        "skipped_update",
        "as ppo.max_kl says",
        [(1, {"update/skipped_minibatches": 2, "update/stopped_by_kl": 2})],
    ),
    (
        "skipped_update",
        "told as a gap",
        [(1, {"update/skipped_minibatches": 1, "parity/max_abs_diff": 0.25})],
    ),
    (
        "entropy_collapse",
        "solved",
        [(10, {"entropy": 0.5, GRADE: 0.4}), (20, {"entropy": 0.01, GRADE: 0.95})],
    ),
    (
        "entropy_collapse",
        "still learning",
        [
            (10, {"entropy": 0.5, GRADE: 0.4}),
            (10, {"entropy": 0.01, GRADE: 0.5}),
            (10, {"entropy": 0.01, GRADE: 0.6}),
        ],
    ),
    (
        "entropy_collapse",
        "lower, not gone",
        [(10, {"entropy": 0.5, GRADE: 0.4}), (20, {"entropy": 0.1, GRADE: 0.4})],
    ),
    (
        "length_runaway",
        "longer and better",
        [(10, {LENGTH: 100, GRADE: 0.4}), (10, {LENGTH: 400, GRADE: 0.6})],
    ),
    (
        "length_runaway",
        "a little longer",
        [(10, {LENGTH: 100, GRADE: 0.4}), (10, {LENGTH: 250, GRADE: 0.4})],
    ),
    ("truncation", "few", [(20, {"stop/length": 0.4})]),
    ("truncation", "none, which is left out", [(20, {"stop/eos": 1.0})]),
    ("truncation", "at first", [(10, {"stop/length": 0.9}), (10, {"stop/length": 0.1})]),
    ("router_collapse", "as it began", [(10, {LOAD: 7, UNUSED: 9}), (10, {LOAD: 8, UNUSED: 11})]),
    ("router_collapse", "a dense model", [(20, {"entropy": 0.5})]),
    ("dead_adapter", "moves", [(10, {f"{MOVED}/up_proj": 1e-9, f"{MOVED}/q_proj": 0.01})]),
    ("dead_adapter", "too soon", [(9, {f"{MOVED}/up_proj": 0.0, f"{MOVED}/q_proj": 0.01})]),
    (
        "dead_adapter",
        "moved once",
        [
            (1, {f"{MOVED}/up_proj": 0.1, f"{MOVED}/q_proj": 0.1}),
            (9, {f"{MOVED}/up_proj": 0.0, f"{MOVED}/q_proj": 0.1}),
        ],
    ),
    (
        "dead_adapter",
        "a step without an update",
        [(10, {f"{MOVED}/up_proj": 0.0, f"{MOVED}/q_proj": 0.0})],
    ),
    (
        "reward_stuck",
        "solved",
        [(10, {"reward/flat_groups": 1, GRADE: 1.0, "gradient_norm/policy": 0.0})],
    ),
    (
        "reward_stuck",
        "groups of one",
        [(10, {"reward/flat_groups": 1, GRADE: 0.4, "gradient_norm/policy": 0.1})],
    ),
    ("reward_stuck", "rising", noisy(0.4, 200, rise=0.2)),
    ("reward_stuck", "too soon to say", noisy(0.4, 199)),
    ("kl_runaway", "near", [(1, {"kl/rollout_k3": 0.01, "kl/reference_k3": 0.5})]),
    ("infra_failures", "some", [(9, ended(scored=9)), (1, ended(scored=8, infra_failure=1))]),
    ("memory", "room", [(1, {"hardware/device_memory_peak_share": 0.9})]),
    ("memory", "unknown", [(1, {})]),
    ("disk", "room", [(1, {"hardware/disk_free_gb": 50.0})]),
    ("gpu_errors", "none", [(1, gpu(ecc_uncorrected=0, xid=0))]),
    ("gpu_throttling", "the power cap of a busy GPU", [(1, gpu(throttle_reasons=0x4))]),
    ("gpu_temperature", "warm", [(1, gpu(celsius=80))]),
]


@pytest.mark.parametrize(("rule", "sentence", "parts"), FIRE)
def test_a_rule_tells_the_number_and_what_to_do(rule, sentence, parts):
    message = RULES[rule](seen(*parts), AlertsConfig())
    assert re.search(sentence, message or ""), message
    assert re.search("[:;] [a-z]", message)


@pytest.mark.parametrize(("rule", "why", "parts"), SILENT)
def test_a_rule_is_silent_where_all_is_well(rule, why, parts):
    assert RULES[rule](seen(*parts), AlertsConfig()) is None


def test_every_rule_is_seen_to_speak_and_to_be_silent():
    assert {rule for rule, *_ in FIRE} == {rule for rule, *_ in SILENT} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_run_that_has_just_begun_raises_no_alarm(rule):
    assert RULES[rule](seen((1, {"entropy": 0.5, GRADE: 0.0})), AlertsConfig()) is None


@pytest.mark.parametrize("name", ["solved", "slow"])
def test_healthy_runs_raise_no_alarm(name: str):
    """Of the tiny MoE: one ends with nearly no entropy at a grade of 0.99, one hardly learns."""
    rows = [row for row in read_rows(DATA / f"{name}.jsonl") if "update/applied" in row]
    assert len(rows) >= 30
    for end in range(1, len(rows) + 1):
        known = Seen(rows[: min(end, WINDOW)], rows[:end])
        told = {rule: RULES[rule](known, AlertsConfig()) for rule in RULES}
        assert set(told.values()) == {None}, (end, told)
