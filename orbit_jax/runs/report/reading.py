"""Run folders as a report reads them: what is there, of runs that go on or ended early as well.

Only `config.json` must be whole. What else is missing, or was cut by a kill or a full disk, is left
out and named in `Run.unread`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from orbit_jax.runs.folder import flat
from orbit_jax.runs.grid import HARMLESS, short, shown

Row = Mapping[str, Any]  # of a file of JSON lines

GAP, GAP_TOKENS = "parity/max_abs_diff", "parity/tokens"
REWARD, SECONDS = "reward/mean", "seconds/step"
HASHES = ("base_hash", "data_hash", "code_hash")
_COUNTED = ("stop/", "outcome/", "tools/")  # what did not happen in a step is not in its row
_DATED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_FACT = re.compile(r"([a-z][a-z_]*): (.*)")
_LABEL_FIELDS, _LABEL_LENGTH = 3, 60  # most in the name of an arm


@dataclass(frozen=True)
class Run:
    """What a run has left behind.

    Attributes:
      name: what it is called among those that are read together.
      config, environment, summary: of the files of these names; empty where there is none.
      rows: of `metrics.jsonl`; what was not finite is None.
      log: what `log.txt` tells, as time and text.
      alerts: rows of `alerts.jsonl`.
      samples: rows of the first and the last file of samples, by step.
      unread: a sentence for everything that could not be read.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Row]
    log: Sequence[tuple[str, str]]
    alerts: Sequence[Row]
    samples: Mapping[int, Sequence[Row]]
    unread: Sequence[str]

    @property
    def seed(self) -> Any:
        """The config's."""
        return self.config.get("seed")

    @property
    def steps(self) -> int:
        """How many the config asks for."""
        return self.config.get("steps", self.steps_done)

    @cached_property
    def steps_done(self) -> int:
        """The last step that has a row."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the last evaluation; if more were asked for, not yet."""
        whole = self.summary.get("steps") == self.config.get("steps")
        return bool(self.summary.get("finished")) and whole

    @cached_property
    def facts(self) -> dict[str, str]:
        """What the log tells of the base, the adapter and the data, by name."""
        found = (_FACT.fullmatch(text) for _, text in self.log)
        return {match[1]: match[2] for match in found if match and match[2] != "None"}

    def told(self, beginning: str) -> list[str]:
        """What the log tells that begins so."""
        return [text for _, text in self.log if text.startswith(beginning)]

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Steps and values, NaN where a value was not finite; of two rows of a step the last.

        A count that a step leaves out is 0.
        """
        found: dict[int, float | None] = {}
        if metric.startswith(_COUNTED):
            found = {row["step"]: 0.0 for row in self.rows if REWARD in row}
        found |= {row["step"]: row[metric] for row in self.rows if metric in row}
        return [(step, math.nan if v is None else v) for step, v in sorted(found.items())]

    def total(self, metric: str) -> float:
        """The sum over the steps, of what is finite."""
        return sum(value for _, value in self.values(metric) if not math.isnan(value))

    @cached_property
    def gap(self) -> float | None:
        """The largest log-prob gap, NaN if one was not finite, None if none was measured."""
        seen = [value for _, value in self.values(GAP)]
        if self.summary.get("parity_tokens"):
            of_all = self.summary.get("parity_max_abs_diff")
            seen.append(math.nan if of_all is None else of_all)
        return None if not seen else math.nan if any(map(math.isnan, seen)) else max(seen)

    @cached_property
    def gap_tokens(self) -> int:
        """How many tokens that gap is over."""
        return int(max(self.total(GAP_TOKENS), self.summary.get("parity_tokens") or 0))

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Of all steps, evaluations and start-up left out."""
        seconds = self.total(SECONDS)
        return self.total("tokens") / seconds if seconds else self.summary.get("tokens_per_second")


class Arm(NamedTuple):
    """Runs that differ in their seed alone, and in fields that change nothing.

    Attributes:
      letter: A, B, ...: what it is called in pictures.
      label: in which fields it differs from the other arms.
    """

    letter: str
    label: str
    runs: Sequence[Run]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, in their order.

    Raises:
      ValueError: for a folder that is not there, or is none of a run.
    """
    paths = [folder.absolute() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ValueError(f"{folders[i]} is given twice: name each run once")
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """The arms, in the order of their first runs."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_identity(run), []).append(run)
    firsts = [meaning(runs[0]) for runs in together.values()]
    return [
        Arm(_letter(i), _label(firsts[i], firsts, members[0]), members)
        for i, members in enumerate(together.values())
    ]


def meaning(run: Run) -> dict[str, Any]:
    """What decides a run beside its seed: fields of its config and the hashes that it logged."""
    hashes = {name: run.facts[name] for name in HASHES if name in run.facts}
    return {k: v for k, v in flat(run.config).items() if k not in HARMLESS} | hashes


def differing(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields whose values differ, or that some lack, in their order."""
    fields = dict.fromkeys(field for column in columns for field in column)
    return [f for f in fields if any(c.get(f, ...) != columns[0].get(f, ...) for c in columns)]


def usual(field: str, columns: Sequence[Row]) -> Any:
    """What more than half of them have in a field, `...` for none; None if nothing is so common."""
    values = [column.get(field, ...) for column in columns]
    return next((v for v in values if 2 * values.count(v) > len(values)), None)


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; name one that a run wrote")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no run folder: it has no config.json; name one of a run")
    unread: list[str] = []
    config = _json(folder / "config.json", unread)
    if not config:
        raise ValueError(f"{folder} cannot be reported: {unread[0]}; put that file back")
    files = sorted(folder.glob("samples/step_*.jsonl"))
    samples = {int(f.stem.removeprefix("step_")): f for f in (*files[:1], *files[-1:])}
    numbered = [r for r in _rows(folder / "metrics.jsonl", unread) if type(r.get("step")) is int]
    return Run(
        name=name,
        folder=folder,
        config=config,
        environment=_json(folder / "environment.json", unread),
        summary=_json(folder / "summary.json", unread),
        rows=[{k: v for k, v in row.items() if _is_value(v)} for row in numbered],
        log=_log(_text(folder / "log.txt", unread)),
        alerts=_rows(folder / "alerts.jsonl", unread),
        samples={step: _rows(file, unread) for step, file in samples.items()},
        unread=unread,
    )


def _log(text: str) -> list[tuple[str, str]]:
    """Times and texts; a line without a time, as of a traceback, belongs to the one before."""
    entries: list[tuple[str, str]] = []
    for line in text.splitlines():
        if match := _DATED.fullmatch(line):
            entries.append((match[1], match[2]))
        elif entries and line.strip():
            entries[-1] = (entries[-1][0], f"{entries[-1][1]}\n{line}")
    return entries


def _is_value(value: Any) -> bool:
    """Whether a metric is a number, or None for one that was not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _text(path: Path, unread: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        unread.append(f"{path.name} cannot be read: {error.strerror}")
        return ""


def _json(path: Path, unread: list[str]) -> dict[str, Any]:
    text = _text(path, unread)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        unread.append(f"{path.name} is no whole JSON")
        return {}
    return found


def _rows(path: Path, unread: list[str]) -> list[dict[str, Any]]:
    """The lines that are whole; a kill cuts the last one, a full disk perhaps another."""
    rows, lost = [], 0
    for line in filter(None, _text(path, unread).split("\n")):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            lost += 1
    if lost:
        what = "a line is" if lost == 1 else f"{lost} lines are"
        unread.append(f"{what} cut short in {path.name}, and left out here")
    return rows


def _names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, as long as it takes to tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _identity(run: Run) -> str:
    return json.dumps(sorted(meaning(run).items()))


def _label(own: Row, firsts: Sequence[Row], run: Run) -> str:
    fields = [f for f in differing(firsts) if own.get(f, ...) != usual(f, firsts)]
    if len(firsts) == 1:
        return str(run.config.get("experiment", run.name))
    # What an older code did not know yet tells less than what all have.
    told = [f for f in fields if all(f in first for first in firsts)]
    told = (told or [f for f in fields if f in own])[:_LABEL_FIELDS]
    label = ", ".join(f"{short(f, own)}={shown(own[f])}" for f in told)
    label = label if len(label) <= _LABEL_LENGTH else f"{label[:_LABEL_LENGTH]}…"
    more = f"{len(fields) - len(told)} more" * (len(fields) > len(told))
    return ", ".join(filter(None, (label, more))) or "the usual values"


def _letter(number: int) -> str:
    rounds, letter = divmod(number, 26)
    return chr(ord("A") + letter) + (str(rounds) if rounds else "")
