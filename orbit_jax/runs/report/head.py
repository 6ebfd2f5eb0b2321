"""The head of a report: what needs a look, what each arm came to, and every run in a line."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from orbit_jax.runs.report.curves import REWARD
from orbit_jax.runs.report.markup import folded, number, plural, table, text
from orbit_jax.runs.report.reading import GAP, Arm, Run

GREEDY, SAMPLED = "heldout/pass_greedy", "heldout/pass_sampled"
_SHOWN_METRICS = 6  # names of metrics in a warning, at most
_LONGEST_QUOTE = 300  # characters


def warnings_section(arms: Sequence[Arm]) -> str:
    """All warnings, run by run; or that there are none."""
    runs = [run for arm in arms for run in arm.runs]
    found = {run.name: [*warnings_of(run)] for run in runs}
    pooled = [
        f"<li><b>Arm {arm.letter}</b> {text(warning)}</li>"
        for arm in arms
        for warning in _pooled(arm)
    ]
    if not pooled and not any(found.values()):
        tokens = sum(run.gap_tokens for run in runs)
        whole = "The run has" if len(runs) == 1 else f"All {len(runs)} runs have"
        return (
            f'<p class="fine">✓ {whole} finished, with a log-prob gap of exactly 0 over '
            f"{tokens:,} tokens, and without alerts.</p>"
        )
    lines = [
        f"<li><b>{text(name)}</b> {text(warning)}</li>"
        for name, warnings in found.items()
        for warning in warnings
    ]
    items = "".join([*pooled, *lines])
    return f'<section class="warnings"><h2>To look at</h2><ul>{items}</ul></section>'


def warnings_of(run: Run) -> Iterator[str]:
    """What a reader of the run's curves must know, in words."""
    if not run.finished:
        words = [line for _, told in run.log for line in told.splitlines()]
        last = f"; its log ends with “{words[-1]:.{_LONGEST_QUOTE}}”" if words else ""
        yield f"is not finished: step {run.steps_done:,} of {run.steps:,}{last}"
    gaps = [value for _, value in run.values(GAP)]
    if run.steps_done and run.gap is None:
        yield "has no log-prob gap measured"
    elif run.gap:  # true of NaN too
        expected = ", as parity=corrected allows" * (run.config.get("parity") == "corrected")
        size = "was not finite" if math.isnan(run.gap) else f"is not 0 but up to {run.gap:.3g}"
        steps = sum(gap != 0 for gap in gaps)
        yield f"log-prob gap {size}, in {steps} of {plural(len(gaps), 'step')}{expected}"
    yield from _alerts(run)
    lost = Counter(name for row in run.rows for name, value in row.items() if value is None)
    lost.pop(GAP, None)
    if lost:
        names = [f"{name} ({count})" for name, count in lost.most_common(_SHOWN_METRICS)]
        more = f" and {len(lost) - len(names)} more" * (len(lost) > len(names))
        yield f"metrics that were not finite, with steps: {', '.join(names)}{more}"
    failures = run.total("reward/infra_failures")
    if failures:
        yield f"{plural(int(failures), 'reward')} could not be given (infra failures)"
    for beginning in ("WARNING: ", "environment changed"):
        if lines := run.told(beginning):
            more = f" (and {len(lines) - 1} more of the kind)" * (len(lines) > 1)
            yield f"log: {lines[-1].removeprefix('WARNING: '):.{_LONGEST_QUOTE}}{more}"
    yield from run.unread


def cards(arms: Sequence[Arm]) -> str:
    """What each arm came to, in large figures; the colours and letters of the pictures."""
    shown = "".join(_card(i, arm, len(arms) == 1) for i, arm in enumerate(arms))
    return f'<div class="cards">{shown}</div>'


def runs_table(arms: Sequence[Arm]) -> str:
    """A line for each run."""
    heads = ("run", "seed", "began", "steps", "held-out, greedy", "held-out, temperature 1")
    heads += ("reward, first → last", "log-prob gap", "tokens/s", "state")
    rows = [
        (
            f'<span class="key a{i}">{arm.letter}</span> ' * (len(arms) > 1) + text(run.name),
            text(run.seed),
            text(run.log[0][0] if run.log else "–"),
            f"{run.steps_done:,} of {run.steps:,}",
            before_after(run, GREEDY),
            before_after(run, SAMPLED),
            " → ".join(map(number, _ends(run, REWARD))) or "–",
            _gap(run.gap, run.gap_tokens),
            number(run.tokens_per_second),
            "finished" if run.finished else '<b class="bad">not finished</b>',
        )
        for i, arm in enumerate(arms)
        for run in arm.runs
    ]
    return table(heads, rows, "runs") + _evaluations(arms)


def before_after(run: Run, metric: str) -> str:
    """A rate before training and after; of a run that has not ended, its newest with the step."""
    values = run.values(metric)
    if not values:
        return "–"
    said = [number(value, metric) for _, value in (values[0], *values[1:][-1:])]
    newest = f' <span class="note">at step {values[-1][0]:,}</span>' * (not run.finished)
    return " → ".join(said) + newest


def _alerts(run: Run) -> Iterator[str]:
    """Each rule that fired, with its last message, and whether that is over."""
    for rule in dict.fromkeys(str(row.get("rule")) for row in run.alerts):
        *_, newest = of_rule = [row for row in run.alerts if str(row.get("rule")) == rule]
        begun = [row for row in of_rule if row.get("state") != "over"] or of_rule
        times = f"{plural(len(begun), 'time')}, last at" if len(begun) > 1 else "at"
        over = f" (over at step {newest.get('step')})" * (newest.get("state") == "over")
        at, message = begun[-1].get("step"), begun[-1].get("message")
        yield f"alert {rule}, {times} step {at}{over}: {message}"


def _pooled(arm: Arm) -> Iterator[str]:
    commits = {run.environment.get("git_commit") for run in arm.runs if run.environment}
    if len(commits) > 1:
        yield f"is of {len(commits)} commits: {', '.join(sorted(map(str, commits)))}"


def _card(i: int, arm: Arm, alone: bool) -> str:
    runs, seeds = arm.runs, ", ".join(str(run.seed) for run in arm.runs)
    gaps = [run.gap for run in runs if run.gap is not None]
    gap = max(gaps, key=lambda gap: (math.isnan(gap), gap), default=None)
    whole = [run for run in runs if run.finished] or runs  # half a run would pull a mean down
    figures = {
        "held-out, greedy": _learned(whole, GREEDY),
        "held-out, temperature 1": _learned(whole, SAMPLED),
        "training reward": _learned(whole, REWARD),
        "log-prob gap": _gap(gap, sum(run.gap_tokens for run in runs)),
        "tokens/s": _mean([run.tokens_per_second for run in runs if run.tokens_per_second]),
    }
    blocks = "".join(
        f"<div><dt>{name}</dt><dd>{shown}</dd></div>" for name, shown in figures.items() if shown
    )
    ended = sum(run.finished for run in runs)
    state = "finished"
    if ended < len(runs):
        state = f'<b class="bad">{ended} of {len(runs)} finished</b>'
        state += ", whose figures these are" if ended else ""
    key = "" if alone else f'<span class="key a{i}">{arm.letter}</span> '
    return (
        f'<article class="card a{i}"><h3>{key}{text(arm.label)}</h3><p class="note">'
        f"{plural(len(runs), 'seed')}: {text(seeds)} · {state}</p><dl>{blocks}</dl></article>"
    )


def _learned(runs: Sequence[Run], metric: str) -> str:
    """The mean over runs before and after, and how far apart the runs are after; or nothing."""
    ends = [pair for run in runs if (pair := _ends(run, metric))]
    if not ends:
        return ""
    before, after = zip(*ends, strict=True)
    spread = f"{number(min(after), metric)} to {number(max(after), metric)}"
    shown = f" <small>{spread}</small>" * (min(after) < max(after))
    return f"{_mean(before, metric)} → {_mean(after, metric)}{shown}"


def _ends(run: Run, metric: str) -> list[float]:
    values = [value for _, value in run.values(metric)]
    return [values[0], values[-1]] if values else []


def _mean(values: Sequence[float], metric: str = "") -> str:
    return number(sum(values) / len(values), metric) if values else "–"


def _gap(gap: float | None, tokens: int) -> str:
    if gap is None:
        return "–"
    shown = "0" if gap == 0 else f'<b class="bad">{number(gap)}</b>'
    return f"{shown} <small>over {plural(tokens, 'token')}</small>"


def _evaluations(arms: Sequence[Arm]) -> str:
    """All pass rates that were taken before and after training, if there are more than those."""
    runs = [(arm, run) for arm in arms for run in arm.runs]
    taken = {name for _, run in runs for row in run.rows for name in row if "/pass_" in name}
    others = sorted(taken - {GREEDY, SAMPLED})
    if not others:
        return ""
    rows = [(text(run.name), *(before_after(run, name) for name in others)) for _, run in runs]
    return folded("Pass rates on other problems", table(("run", *map(text, others)), rows, "runs"))
