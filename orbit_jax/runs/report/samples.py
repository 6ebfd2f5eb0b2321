"""Samples side by side: the same or like prompts, the first step against the last, run by run."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orbit_jax.runs.report.markup import number, plural, text
from orbit_jax.runs.report.reading import Arm, Row, Run

MOST_PROMPTS = 5
_MOST_CHARACTERS = 1200  # of a text; of a longer one both ends are shown
_COLUMN_WIDTH = "minmax(14rem, 1fr)"

CAPTION = (
    "Coloured is what the model sampled; grey is what it was given, by a tool or a user, and was "
    "not trained on. Of rollouts with both, the strip shows the same token by token, marks of the "
    "chat included. Of each prompt's rollouts this is the first, chosen by nothing else."
)

Where = tuple[str, str]  # a run's name, and "first" or "last"


class Shown(NamedTuple):
    """A sample on the page, and the rewards of all rollouts of its prompt."""

    row: Row
    rewards: Sequence[float | None]


def samples_section(arms: Sequence[Arm]) -> str:
    """All of it, as markup."""
    runs = [run for arm in arms for run in arm.runs]
    places = chosen(runs)
    if not places:
        return '<p class="note">No samples have been written.</p>'
    return f'<p class="note">{CAPTION}</p>{"".join(_place(arms, place) for place in places)}'


def chosen(runs: Sequence[Run]) -> list[dict[Where, Shown]]:
    """For each place on the page, samples of one kind, that is of one task and difficulty.

    They are of one prompt as far as runs and steps have it in common.
    """
    files = {
        (run.name, when): _by_problem(run.samples[step])
        for run in runs
        for when, step in steps_of(run).items()
    }
    kinds = {key: _kind(rows[0]) for groups in files.values() for key, rows in groups.items()}
    common = Counter(key for groups in files.values() for key in groups)
    places: list[dict[Where, Shown]] = []
    for kind in itertools.cycle(dict.fromkeys(kinds.values())):
        place = {}
        for where, groups in files.items():
            fitting = [key for key in groups if kinds[key] == kind]
            if fitting:
                key = max(fitting, key=common.__getitem__)  # the first of those with the most
                rows = groups.pop(key)
                place[where] = Shown(rows[0], [row.get("reward") for row in rows])
        places += [place] * bool(place)
        if len(places) == MOST_PROMPTS or not any(files.values()):
            return places
    return places


def steps_of(run: Run) -> dict[str, int]:
    """`first` and `last` -> the step whose samples these are, where there are any."""
    steps = [step for step, rows in sorted(run.samples.items()) if rows]
    return dict(zip(("first", "last"), steps, strict=False))


def _by_problem(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        problem = row.get("problem", row.get("prompt"))
        groups.setdefault(f"{row.get('task')}/{problem}", []).append(row)
    return groups


def _kind(row: Row) -> str:
    return " ".join(str(row[name]) for name in ("task", "difficulty") if row.get(name))


def _place(arms: Sequence[Arm], place: Mapping[Where, Shown]) -> str:
    posed = {(shown.row.get("prompt"), shown.row.get("answer")) for shown in place.values()}
    title = f"<b>{text(_kind(next(iter(place.values())).row))}</b>"
    if len(posed) == 1:
        title += f" {_posed(next(iter(place.values())).row)}"
    runs = [(i, arm, run) for i, arm in enumerate(arms) for run in arm.runs]
    seeds = [run.seed for *_, run in runs]
    several = len(set(map(str, seeds))) > 1
    runs.sort(key=lambda one: seeds.index(one[2].seed))  # which share their prompts, side by side
    cells = []
    for when in ("first", "last"):
        if any(where[1] == when for where in place):
            for i, arm, run in runs:
                name = [arm.letter] * (len(arms) > 1) + [f"seed {text(run.seed)}"] * several
                cells.append(_cell(i, name, run, when, place.get((run.name, when)), len(posed) > 1))
    columns = len(runs) if len(runs) > 1 else 2
    return (
        f'<section class="place"><h3>{title}</h3><div class="scroll"><div class="samples" '
        f'style="grid-template-columns: repeat({columns}, {_COLUMN_WIDTH})">{"".join(cells)}'
        "</div></div></section>"
    )


def _cell(
    arm: int, name: Sequence[str], run: Run, when: str, shown: Shown | None, posed: bool
) -> str:
    if shown is None:
        return '<article class="sample none">no sample of this kind</article>'
    row, step = shown.row, steps_of(run)[when]
    label = " · ".join([*name, f"step {step:,}"])
    prompt = f'<div class="posed">{_posed(row)}</div>' if posed else ""
    return (
        f'<article class="sample a{arm}"><header><span class="who">{label}</span>{_verdict(shown)}'
        f"</header>{prompt}{_turns(row)}{_strip(row)}</article>"
    )


def _posed(row: Row) -> str:
    answer = row.get("answer")
    right = f' <span class="note">answer</span> <code>{_cut(answer)}</code>' if answer else ""
    return f"<code>{_cut(row.get('prompt', ''))}</code>{right}"


def _verdict(shown: Shown) -> str:
    """The reward, and what else is known of the sample."""
    row, reward = shown.row, shown.row.get("reward")
    parts = row.get("parts") if isinstance(row.get("parts"), dict) else {}
    grade = parts.get("correctness", reward)
    if grade is None:
        mark, kind = "–", "none"
    elif 0 < grade < 1:
        mark, kind = "◐", "partly"
    else:
        mark, kind = ("✓", "right") if grade > 0 else ("✗", "wrong")
    told = "no reward" if reward is None else number(reward)
    scored = [value for value in shown.rewards if value is not None]
    said = [text(row[k]) for k in ("outcome", "stop") if row.get(k) not in (None, "scored")]
    said.append(plural(len(row.get("ids", ())), "token"))
    if scored:
        said.append(f"prompt's mean {number(sum(scored) / len(scored))}")
    return (
        f'<span class="reward {kind}">{mark} {told}</span>'
        f'<span class="note">{" · ".join(said)}</span>'
    )


def _turns(row: Row) -> str:
    """What followed the prompt, as texts."""
    parts = []
    for role, said in row.get("turns") or [("assistant", "")]:
        if role == "assistant":
            parts.append(f'<div class="said">{_cut(said) or "<i>nothing</i>"}</div>')
        else:
            parts.append(f'<div class="given"><b>{text(role)}</b> {_cut(said)}</div>')
    return "".join(parts)


def _strip(row: Row) -> str:
    """The mask, token by token, of a rollout that was given something."""
    mask = row.get("sampled") or [True]
    if all(mask):
        return ""
    at, parts = 0, []
    for sampled, tokens in itertools.groupby(mask):
        width = len(list(tokens))
        if sampled:
            parts.append(f'<rect x="{at}" width="{width}" height="1"/>')
        at += width
    told = f"sampled {sum(mask)} of {len(mask)} tokens"
    return (
        f'<svg class="strip" viewBox="0 0 {at} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{told}"><title>{told}</title>{"".join(parts)}</svg>'
    )


def _cut(value: Any) -> str:
    """A text as markup; the middle of a long one is left out."""
    whole = str(value)
    if len(whole) <= _MOST_CHARACTERS:
        return text(whole)
    head, tail = whole[: _MOST_CHARACTERS * 2 // 3], whole[-_MOST_CHARACTERS // 3 :]
    left_out = plural(len(whole) - len(head) - len(tail), "character")
    return f'{text(head)}<span class="cut"> … {left_out} … </span>{text(tail)}'
