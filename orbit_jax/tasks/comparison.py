"""Two evaluations side by side, problem by problem."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_jax.tasks import statistics
from orbit_jax.tasks.evaluation import FILE, groups


def read_two(paths: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two evaluations as they were written; a path is of the file or of its folder.

    Raises:
      ValueError: if there are not two, or one is none.
    """
    if len(paths) != 2:
        raise ValueError(f"--compare takes two evaluations, got {len(paths)}: name {FILE} twice")
    first, second = (_read(Path(path)) for path in paths)
    return first, second


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per measure of each group, on the problems and measures that two evaluations share.

    Raises:
      ValueError: if they share none.
    """
    other = {(one["split"], one["digest"]): one for one in second["problems"]}
    pairs = [
        {**one, "other": other[key]["measures"]}
        for one in first["problems"]
        if (key := (one["split"], one["digest"])) in other
    ]
    rows = []
    for group, members in groups(pairs):
        for measure in members[0]["measures"]:
            if measure not in members[0]["other"]:
                continue
            values = [(one["measures"][measure], one["other"][measure]) for one in members]
            known = [pair for pair in values if not any(map(math.isnan, pair))]
            if known:
                before, after = zip(*known, strict=True)
                means = {"first": sum(before) / len(known), "second": sum(after) / len(known)}
                paired = dataclasses.asdict(statistics.compare(before, after))
                rows.append({**group, "measure": measure, **means, **paired})
    if not rows:
        raise ValueError(
            f"the evaluations of {first['name']!r} and {second['name']!r} share no problem: "
            "evaluate both with the same data (config.task) and --splits"
        )
    return rows


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What a comparison should be read with: problems of one alone, and other ways of sampling."""
    one, other = ({(p["split"], p["digest"]) for p in x["problems"]} for x in (first, second))
    found = []
    if one != other:
        found.append(
            f"left out: {len(one - other):,} problems of the first alone, "
            f"{len(other - one):,} of the second"
        )
    for name, value in first["settings"].items():
        changed = second["settings"].get(name)
        if name != "ks" and changed != value:
            found.append(f"sampled otherwise: {name} {value} against {changed}")
    return found


def _read(path: Path) -> dict[str, Any]:
    path = path / FILE if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for one in found["problems"]:
            measures = one["measures"].items()
            one["measures"] = {k: math.nan if v is None else float(v) for k, v in measures}
            _ = one["split"], one["digest"], one["task"], one["difficulty"]
        _ = found["name"], found["settings"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no {FILE} of an evaluation: give one, or its folder") from None
    return found
