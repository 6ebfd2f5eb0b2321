"""The rules of alerts: from the metrics of the newest steps to one sentence, or to None.

A sentence gives the number and says what to do. Most thresholds are relative to the run's first
steps. A metric that a run does not have is NaN here, and a comparison with NaN is false: then the
rule is silent.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from orbit_jax.runs.hardware_rules import disk, gpu_errors, gpu_temperature, gpu_throttling, memory

if TYPE_CHECKING:
    from orbit_jax.alerts_config import AlertsConfig

WINDOW = 10  # steps whose mean is looked at
GAIN = 0.02  # of the grade, which is more than chance
SOLVED = 0.9  # the grade from which on a policy may be sure of itself
GRADE = "reward/correctness"
_MORE_UNUSED = 4  # experts, of all layers, that have come to be unused

Row = Mapping[str, Any]  # of metrics.jsonl: what was not finite is None


class Seen(NamedTuple):
    """What is known of a run.

    Attributes:
      first: its first steps, at most WINDOW.
      rows: its newest steps, oldest first, as many as the rules read.
    """

    first: Sequence[Row]
    rows: Sequence[Row]


Rule = Callable[[Seen, "AlertsConfig"], str | None]


def log_prob_gap(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Sampler and trainer disagree, under a recipe that holds them to be equal."""
    row = seen.rows[-1]
    gap = row.get("parity/max_abs_diff", 0.0)
    if gap == 0 or "correction/weight_mean" in row:
        return None
    return (
        f"log-probs of sampler and trainer differ by {_number(gap)}, they must be equal: go on "
        "with parity=tiles, and report it"
    )


def not_finite(seen: Seen, limits: "AlertsConfig") -> str | None:
    """A metric is NaN or infinite."""
    names = [name for name, value in seen.rows[-1].items() if value is None]
    if not names:
        return None
    return (
        f"{len(names)} metrics are not finite ({_some(names)}): look at the step's samples, lower "
        "optimizer.learning_rate"
    )


def skipped_update(seen: Seen, limits: "AlertsConfig") -> str | None:
    """An update was deselected, for another reason than `ppo.max_kl`."""
    row = seen.rows[-1]
    if log_prob_gap(seen, limits):
        return None
    skipped = row.get("update/skipped_minibatches") or 0
    skipped -= row.get("update/stopped_by_kl") or 0
    if skipped <= 0:
        return None
    return (
        f"{skipped:.0f} updates of the step were not made: their gradient was not finite, or "
        f"nothing was left to train on ({_number(row.get('reward/infra_failures', 0))} rewards "
        "were infra failures); look at the step's samples"
    )


def entropy_collapse(seen: Seen, limits: "AlertsConfig") -> str | None:
    """The policy has stopped to explore, and to learn, before the task is solved."""
    now, began = _mean(_later(seen), "entropy"), _mean(seen.first, "entropy")
    grade, before = _mean(_later(seen), GRADE), _mean(seen.rows[-2 * WINDOW : -WINDOW], GRADE)
    if not (now < limits.entropy_share * began and grade < min(before + GAIN, SOLVED)):
        return None
    return (
        f"entropy is {now:.2g}, {now / began:.1%} of the {began:.2g} of the first steps, and the "
        f"grade stays at {grade:.2f}: nothing else is tried any more; lower "
        "optimizer.learning_rate, raise ppo.clip_high or ppo.entropy_coefficient, or hold the "
        "policy by ppo.kl"
    )


def length_runaway(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Completions have become long, and no better."""
    name = "completion/length_mean"
    now, began = _mean(_later(seen), name), _mean(seen.first, name)
    grade, grade_began = _mean(_later(seen), GRADE), _mean(seen.first, GRADE)
    if not (now > limits.length_growth * began and grade < grade_began + GAIN):
        return None
    return (
        f"completions have {now:.0f} tokens, {now / began:.1f} times the {began:.0f} of the first "
        f"steps, and the grade is {grade:.2f}, {grade_began:.2f} at first: let length cost "
        "something (reward.length_buffer), or use ppo.aggregation=constant_length"
    )


def truncation(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Many completions are cut at the limit of tokens, and not only at first."""
    share = _mean(_later(seen), "stop/length", absent=0.0)
    if not share > limits.truncated_share:
        return None
    return (
        f"{share:.0%} of completions were cut at the limit of tokens in the last {WINDOW} steps: "
        "raise sampler.max_completion_tokens, or let length cost something (reward.length_buffer)"
    )


def router_collapse(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Tokens crowd on few experts, or experts have come to be unused."""
    name, unused = "router/load_max_over_mean", "router/unused_experts"
    now, began = _mean(_later(seen), name), _mean(seen.first, name)
    idle, idle_began = _mean(_later(seen), unused), _mean(seen.first, unused)
    if now > limits.router_growth * began:
        what = f"the busiest expert has {now:.1f} times the mean load, {began:.1f} times at first"
    elif idle > max(limits.router_growth * idle_began, idle_began + _MORE_UNUSED):
        what = f"{idle:.0f} experts get no token, {idle_began:.0f} at first"
    else:
        return None
    return (
        f"{what}: the policy has moved far from what the router knows; lower "
        "optimizer.learning_rate, hold it by ppo.kl, or leave attention out of adapter.targets"
    )


def dead_adapter(seen: Seen, limits: "AlertsConfig") -> str | None:
    """A group of the adapter's weights does not move while others do."""
    rows = _recent(seen)
    prefix = "adapter/update_size/"
    moved = [
        {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)} for row in rows
    ]
    if not rows or not all(any(sizes.values()) for sizes in moved):
        return None
    dead = [name for name in moved[-1] if all(sizes.get(name) == 0 for sizes in moved)]
    if not dead:
        return None
    return (
        f"the adapter of {_some(dead)} has not moved in {WINDOW} steps: no gradient reaches it; "
        "look at gradient_norm/ of it, or leave it out of adapter.targets"
    )


def reward_stuck(seen: Seen, limits: "AlertsConfig") -> str | None:
    """There is nothing to learn from, or for a long time nothing was learnt."""
    recent = _recent(seen)
    grade, flat = _mean(recent, GRADE), _mean(recent, "reward/flat_groups")
    # Where all are equal and there is a gradient, it does not come from groups.
    elsewhere = flat == 1 and _mean(recent, "gradient_norm/policy") > 0
    if flat > 0.95 and grade < SOLVED and not elsewhere:
        return (
            f"{flat:.0%} of groups had equal rewards in the last {WINDOW} steps, at a grade of "
            f"{grade:.2f}: there is nothing to learn from; use easier problems, a larger "
            "sampler.group_size, task.partial_credit or ppo.dynamic_sampling"
        )
    rewards = [r for row in seen.rows if (r := row.get("reward/mean")) is not None]
    half = limits.stuck_steps // 2
    if half < WINDOW or len(rewards) < 2 * half or grade >= SOLVED:
        return None
    before, after = rewards[-2 * half : -half], rewards[-half:]
    rise = fmean(after) - fmean(before)
    if rise > 2 * math.sqrt((variance(before) + variance(after)) / half):
        return None
    return (
        f"the reward is {fmean(after):.3f} over the last {half} steps and was {fmean(before):.3f} "
        f"over the {half} before: it does not rise; stop here, or change the problems or "
        "optimizer.learning_rate"
    )


def kl_runaway(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Updates carry the policy far from its rollouts, or from the reference."""
    rollout, reference = (_mean(seen.rows[-1:], f"kl/{of}_k3") for of in ("rollout", "reference"))
    if rollout > limits.kl_rollout:
        return (
            f"a step moves the policy by a KL of {rollout:.2g} a token from what sampled, above "
            f"{limits.kl_rollout:g}: lower optimizer.learning_rate or ppo.minibatches, or set "
            "ppo.max_kl"
        )
    if reference > limits.kl_reference:
        return (
            f"the KL to the reference is {reference:.2g} a token, above {limits.kl_reference:g}: "
            "raise ppo.kl_coefficient, or look whether samples still read well"
        )
    return None


def infra_failures(seen: Seen, limits: "AlertsConfig") -> str | None:
    """Graders or tools fail, so that rollouts go unused."""
    rows = seen.rows[-WINDOW:]
    count = sum(row.get("outcome/infra_failure", 0) for row in rows)
    total = sum(v for row in rows for k, v in row.items() if k.startswith("outcome/"))
    if not total or count / total <= limits.infra_share:
        return None
    return (
        f"{count / total:.0%} of rollouts could not be graded in the last {len(rows)} steps "
        f"({count:.0f} of {total:.0f}): `details` of the samples say why; mend the grader or "
        "raise its time (task.grader_max_seconds, task.max_grading_seconds)"
    )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        log_prob_gap,
        not_finite,
        skipped_update,
        entropy_collapse,
        length_runaway,
        truncation,
        router_collapse,
        dead_adapter,
        reward_stuck,
        kl_runaway,
        infra_failures,
        memory,
        disk,
        gpu_errors,
        gpu_throttling,
        gpu_temperature,
    )
}


def _recent(seen: Seen) -> Sequence[Row]:
    """The newest WINDOW rows, or none while there are fewer."""
    return seen.rows[-WINDOW:] if len(seen.rows) >= WINDOW else ()


def _later(seen: Seen) -> Sequence[Row]:
    """The newest WINDOW rows, or none while the first steps are among them."""
    recent = _recent(seen)
    return recent if recent and recent[0]["step"] > seen.first[-1]["step"] else ()


def _mean(rows: Sequence[Row], name: str, absent: float | None = None) -> float:
    """Of the finite values; NaN where there are none."""
    values = [value for row in rows if (value := row.get(name, absent)) is not None]
    return fmean(values) if values else math.nan


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:g}"


def _some(names: Iterable[str]) -> str:
    first, *others = names
    shown = [first, *others[:2]]
    return ", ".join(shown) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
