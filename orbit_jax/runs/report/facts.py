"""What runs were made of: their configs, where they differ, the machine, memory and time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbit_jax.runs.folder import flat
from orbit_jax.runs.printing import quantity, size
from orbit_jax.runs.report.markup import folded, number, plural, table, text
from orbit_jax.runs.report.reading import HASHES, SECONDS, Arm, differing, usual

_MEMORY = "memory, by estimate: "
_LONGEST_VALUE, _SHORT_VALUE = 300, 20  # characters in a table of differences


def config_section(arms: Sequence[Arm]) -> str:
    """The fields that differ, then the whole config of each arm."""
    columns = {
        run.name: flat(run.config) | {k: run.facts[k] for k in HASHES if k in run.facts}
        for arm in arms
        for run in arm.runs
    }
    whole = "".join(
        folded(
            f"Whole config of {_of(arm, arms)}",
            f"<pre>{text(json.dumps(arm.runs[0].config, indent=2))}</pre>",
        )
        for arm in arms
    )
    return _differences(arms, columns, "config") + whole


def environment_section(arms: Sequence[Arm]) -> str:
    """What differs between the machines and the software, then all of it."""
    columns = {run.name: flat(run.environment) for arm in arms for run in arm.runs}
    missing = [name for name, fields in columns.items() if not fields]
    told = f'<p class="note">Not recorded of {text(", ".join(missing))}.</p>' if missing else ""
    known = {name: fields for name, fields in columns.items() if fields}
    if not known:
        return told
    differ = set(differing(list(known.values())))
    same = next(iter(known.values())).items()
    rows = [(text(name), text(value)) for name, value in same if name not in differ]
    whole = folded(
        "What is the same for all" if len(known) > 1 else "All of it", table(("", ""), rows)
    )
    return told + _differences(arms, known, "environment") + whole


def memory_section(arms: Sequence[Arm]) -> str:
    """The estimate that each run made of its memory, beside what was measured."""
    heads = ("run", "frozen base", "working copy", "adapter", "its parameters", "peak, measured")
    rows = []
    for run in (run for arm in arms for run in arm.runs):
        estimate = "".join(run.told(_MEMORY)[-1:])
        parameters = run.facts.get("adapter_parameters", "")
        peak = run.summary.get("peak_memory_bytes")
        rows.append(
            (
                text(run.name),
                *(
                    _bytes(run.facts.get(f"{what}_bytes", ""))
                    for what in ("base", "working_copy", "adapter")
                ),
                quantity(int(parameters)) if parameters.isdecimal() else "–",
                size(peak) if peak else "–",
                text(estimate.removeprefix(_MEMORY)) or "–",
            )
        )
    note = (
        '<p class="note">The estimate is the run’s own, made before it began; the peak is that of '
        "the first device, or of the process where devices keep no count.</p>"
    )
    return table((*heads, "estimate"), rows, "runs wide-last") + note


def timing_section(arms: Sequence[Arm]) -> str:
    """Where the time of each run went."""
    rows = []
    for run in (run for arm in arms for run in arm.runs):
        seconds, steps = run.summary.get("seconds") if run.finished else None, run.values(SECONDS)
        in_steps = run.total(SECONDS)
        share = in_steps / seconds if seconds else None
        bar = f'<meter min="0" max="1" value="{share:.3f}"></meter> {share:.0%}' if share else "–"
        said = [*run.told("start-up: ")[-1:], *run.told("log-prob gate: ")[-1:]]
        rows.append(
            (
                text(run.name),
                _duration(seconds),
                f"{plural(len(steps), 'step')} in {_duration(in_steps)}",
                f"{number(in_steps / len(steps))} s" if steps else "–",
                bar,
                str(len(run.told("resumes"))),
                text("; ".join(said)) or "–",
            )
        )
    heads = ("run", "in all", "in steps", "a step, mean", "share of steps", "resumed", "its log")
    note = (
        '<p class="note">The rest is start-up, compiling, the gate of log-probs, evaluations and '
        "checkpoints.</p>"
    )
    return table(heads, rows, "runs wide-last") + note


def _differences(arms: Sequence[Arm], columns: Mapping[str, Mapping[str, Any]], what: str) -> str:
    """A table of the fields that are not the same in all runs, with a column an arm."""
    runs = [run for arm in arms for run in arm.runs if run.name in columns]
    if len(runs) < 2:
        return ""
    fields = differing([columns[run.name] for run in runs])
    if not fields:
        return f'<p class="note">The {what} is the same in all {len(runs)} runs.</p>'
    shown = [arm for arm in arms if any(run.name in columns for run in arm.runs)]
    of_arms = [[columns[run.name] for run in arm.runs if run.name in columns] for arm in shown]
    rows = [(f"<code>{text(field)}</code>", *_values(field, of_arms)) for field in fields]
    heads = [f'<span class="key a{arms.index(arm)}">{arm.letter}</span>' for arm in shown]
    return table(("field that differs", *heads), rows, "differences")


def _values(field: str, of_arms: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Each arm's value, or those of its runs in their order; what is usual is no news."""
    common = usual(field, [column for columns in of_arms for column in columns])
    for columns in of_arms:
        values = [column.get(field, ...) for column in columns]
        if all(value == values[0] for value in values):
            shown = _value(values[0])
            yield f'<span class="usual">{shown}</span>' if values[0] == common else shown
        else:
            short = all(len(str(value)) < _SHORT_VALUE for value in values)
            yield (", " if short else "<br>").join(map(_value, values))


def _value(value: Any) -> str:
    if value is ...:
        return '<i class="note">absent</i>'
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}…"
    long = len(cut) > 2 * _SHORT_VALUE
    markup = text(cut) or '<i class="note">empty</i>'
    return f'<div class="long">{markup}</div>' if long else markup


def _of(arm: Arm, arms: Sequence[Arm]) -> str:
    run = text(arm.runs[0].name)
    return run if len(arms) == len(arm.runs) == 1 else f"{arm.letter} (that of {run})"


def _bytes(number_of: str) -> str:
    return size(int(number_of)) if number_of.isdecimal() else "–"


def _duration(seconds: float | None) -> str:
    if not seconds:
        return "–"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
