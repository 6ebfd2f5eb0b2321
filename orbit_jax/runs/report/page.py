"""A report of runs, as one page that needs nothing else: no network, no script, no other file."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orbit_jax.runs.files import write_atomic
from orbit_jax.runs.report import facts, head
from orbit_jax.runs.report.curves import (
    REST,
    Curve,
    caption,
    constant,
    curve_of,
    kind_of,
    metrics_of,
)
from orbit_jax.runs.report.markup import folded, number, plural, text
from orbit_jax.runs.report.pictures import Drawn, picture
from orbit_jax.runs.report.reading import GAP, Arm, arms_of, read_runs
from orbit_jax.runs.report.samples import samples_section

_STYLE = Path(__file__).parents[2] / "assets/report.css"
_COLOURS, _DASHES = 6, ("none", "6 3", "2 3", "9 3 2 3")  # colours are in the style
# Even if hostile text became markup, a browser would load nothing and run nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(folders: Sequence[Path], out: Path) -> str:
    """Writes the page of these run folders and returns what it is of, in words.

    Raises:
      ValueError: for a folder that is not there or is none of a run, or if `out` cannot be written.
    """
    if out.is_dir():
        raise ValueError(f"--out={out} is a folder: name a file, as {out / 'report.html'}")
    runs = read_runs(folders)
    arms = arms_of(runs)
    markup = page(arms)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, markup)
    except OSError as error:
        raise ValueError(f"--out={out}: cannot be written: {error.strerror}") from error
    return f"{plural(len(runs), 'run')} in {plural(len(arms), 'arm')}"


def page(arms: Sequence[Arm]) -> str:
    """The whole page."""
    runs = [run for arm in arms for run in arm.runs]
    names = sorted({str(run.config.get("experiment", run.name)) for run in runs})
    title = text(", ".join(names))
    parts = {
        "Curves": curves_section(arms),
        "Samples": samples_section(arms),
        "Config": facts.config_section(arms),
        "Environment": facts.environment_section(arms),
        "Memory": facts.memory_section(arms),
        "Time": facts.timing_section(arms),
    }
    links = "".join(f'<a href="#{name}">{name}</a>' for name in parts)
    sections = "".join(f'<h2 id="{name}">{name}</h2>{body}' for name, body in parts.items())
    of = plural(len(runs), "run") + f" in {plural(len(arms), 'arm')}" * (len(runs) > 1)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}: {of}</title><style>{_STYLE.read_text()}{_arm_styles(len(arms))}</style>"
        f"</head><body><header class='top'><h1>{title}</h1>"
        f'<p class="note">{of} · written {time.strftime("%Y-%m-%d %H:%M")}</p>'
        f"<nav>{links}</nav></header><main>"
        f"{head.warnings_section(arms)}{head.cards(arms)}{head.runs_table(arms)}{sections}"
        f"</main></body></html>\n"
    )


def curves_section(arms: Sequence[Arm]) -> str:
    """Pictures of all metrics by their sections; of those that never change a sentence."""
    last_step = max(run.steps_done for arm in arms for run in arm.runs)
    parts, points_of = [], 1
    for title, metrics in metrics_of(arms).items():
        figures, still = [], []
        for metric in metrics:
            curves = [curve_of(arm, metric) for arm in arms]
            points_of = max([points_of, *(curve.every for curve in curves if curve)])
            value = constant(curves)
            if value is None or kind_of(metric).always:
                figures.append(_figure(metric, curves, arms, last_step))
            else:
                still.append(f"{_title(metric)}&nbsp;{number(value, metric)}")
        content = f'<div class="figures">{"".join(figures)}</div>' if figures else ""
        if still:
            content += f'<p class="note still">At every step: {"; ".join(still)}.</p>'
        if title == REST.title and content:
            parts.append(folded(f"{title} ({len(metrics)})", content))
        elif content:
            parts.append(f"<h3>{text(title)}</h3>{content}")
    if not parts:
        return '<p class="note">No step has been written yet.</p>'
    return f'{_legend(arms)}<p class="note">{caption(arms, points_of)}</p>{"".join(parts)}'


def _figure(
    metric: str, curves: Sequence[Curve | None], arms: Sequence[Arm], last_step: int
) -> str:
    """A picture with its title, and a word on what it cannot show."""
    drawn = [
        Drawn(i, arm.letter if len(arms) > 1 else "", curve)
        for i, (arm, curve) in enumerate(zip(arms, curves, strict=True))
        if curve and np.isfinite(curve.middle).any()
    ]
    lost = sum(curve.lost for curve in curves if curve)
    said = f'<span class="bad">{plural(lost, "value")} not finite</span>' if lost else ""
    said += _zeros(arms) if metric == GAP else ""
    svg = picture(metric, drawn, last_step, kind_of(metric).log, metric == GAP) if drawn else ""
    return f"<figure><figcaption>{said}{_title(metric)}</figcaption>{svg}</figure>"


def _title(metric: str) -> str:
    """What a metric is called, and its name in `metrics.jsonl`."""
    title = kind_of(metric).title
    return f"<b>{text(title or metric)}</b>" + f" <code>{text(metric)}</code>" * bool(title)


def _zeros(arms: Sequence[Arm]) -> str:
    """At how many steps the gap was exactly 0."""
    values = [value for arm in arms for run in arm.runs for _, value in run.values(GAP)]
    zeros = sum(value == 0 for value in values)
    if zeros == len(values):
        return '<span class="good">exactly 0 at every step</span>'
    return f'<span class="bad">exactly 0 at {zeros:,} of {plural(len(values), "step")}</span>'


def _legend(arms: Sequence[Arm]) -> str:
    """The arms, above the pictures for as long as these are in sight."""
    if len(arms) < 2:
        return ""
    keys = "".join(
        f'<span class="entry k{i}"><span class="key a{i}">{arm.letter}</span> '
        f"{text(arm.label)}</span>"
        for i, arm in enumerate(arms)
    )
    return f'<div class="legend">{keys}</div>'


def _arm_styles(count: int) -> str:
    """A colour for each arm, a dash where colours come again; the others fade beneath a pointer."""
    return "".join(
        f".a{i}{{--c:var(--c{i % _COLOURS});--dash:{_DASHES[i // _COLOURS % len(_DASHES)]}}}"
        f"body:has(.k{i}:hover) :is(.curve,.end):not(.a{i}){{opacity:.1}}"
        for i in range(count)
    )
