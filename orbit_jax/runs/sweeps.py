"""Sweeps: settings times seeds, every cell a run of its own, and what they come to together.

A sweep is a folder with `sweep.json` and one run folder a cell. All cells have one config but for
the fields that are swept and the seed. What has been run is read off the folders: a run that has
finished is kept, whatever grid it is now part of, any other goes on from where it is.
"""

import dataclasses
import difflib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from orbit_jax.config import Config, to_dict
from orbit_jax.runs.files import to_json, write_atomic
from orbit_jax.runs.folder import SUMMARY_KEYS, RunFolder, changes, flat
from orbit_jax.runs.grid import HARMLESS, Cell, cells_of, merged, order, short, shown
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.view import METRICS
from orbit_jax.tasks.statistics import student_interval

FILE = "sweep.json"
MEASURES = (
    "heldout_pass_before",
    "heldout_pass_after",
    "gain",
    "reward_mean",
    "reward_last",
    "parity_max_abs_diff",
    "seconds",
)


@dataclasses.dataclass
class Sweep:
    """All cells that a folder has or is to have; `asked` are those of the present grid, in order.

    `script` is the experiment that runs each, `config` the plain config of all.
    """

    folder: Path
    script: str
    config: dict[str, Any]
    cells: list[Cell]
    asked: list[Cell]

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """What an earlier call wrote, with the figures that the runs have by now."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {FILE}: name a folder that a sweep wrote")
        found = json.loads(path.read_text(encoding="utf-8"))
        config = found["config"]
        cells = []
        for row in found["cells"]:
            kept = {name: row[name] for name in ("name", "settings", "seed", "error", "commit")}
            full = merged(config, row["settings"] | {"seed": row["seed"]})
            cells.append(Cell(**kept, config=full, figures=row["figures"]))
        sweep = cls(Path(folder), found["run"], config, cells, [])
        for cell in cells:
            if sweep.path(cell).is_dir():  # else the file has travelled alone
                sweep.refresh(cell)
        return sweep

    @classmethod
    def plan(
        cls,
        folder: str | Path,
        script: str,
        config: Config,
        grid: Mapping[str, Sequence[Any]],
        seeds: Sequence[int],
    ) -> Self:
        """The cells of a grid, checked, beside those that the folder has already.

        A cell that is there already, perhaps as part of another grid, is that one.

        Raises:
          ValueError: for a cell that no run would accept, for two that are the same run, and for a
            folder whose runs have another config or are of another experiment.
        """
        if config.mesh.processes > 1:
            raise ValueError(
                f"config.mesh.processes={config.mesh.processes}: a sweep starts one process for "
                "each run: use 1, on one node"
            )
        base = to_dict(config)
        asked = cells_of(base, grid, seeds)
        sweep = cls(Path(folder), script, base, [], asked)
        if (sweep.folder / FILE).exists():
            earlier = cls.read(folder)
            if Path(earlier.script).resolve() != Path(script).resolve():
                raise ValueError(
                    f"out={str(folder)!r}: its runs are those of {earlier.script}, not of "
                    f"{script}: name another folder"
                )
            sweep._require_same(earlier.config, base)
            there = {c.identity: c for c in earlier.cells}
            sweep.asked = [there.get(cell.identity, cell) for cell in asked]
            sweep.cells = [c for c in earlier.cells if sweep.path(c).is_dir() or c in sweep.asked]
        for cell in sweep.asked:
            if (sweep.path(cell) / "config.json").is_file():
                sweep._require_same(RunFolder(sweep.path(cell)).config(), cell.config)
            sweep.refresh(cell)
        sweep.cells += [cell for cell in sweep.asked if cell not in sweep.cells]
        return sweep

    def path(self, cell: Cell) -> Path:
        """The cell's run folder."""
        return self.folder / cell.name

    def prepare(self, cell: Cell) -> None:
        """Makes the cell's run folder if it is not there: its run goes on from it either way."""
        if not (self.path(cell) / "config.json").is_file():
            RunFolder(self.path(cell)).prepare(cell.config)

    def refresh(self, cell: Cell) -> None:
        """Reads what the cell's run has come to."""
        cell.figures, environment = figures(self.path(cell)), RunFolder(self.path(cell)).environment
        if environment.is_file():
            cell.commit = json.loads(environment.read_text(encoding="utf-8"))["git_commit"]

    def state(self, cell: Cell) -> str:
        """Where a cell stands: finished, failed, unfinished or waiting."""
        if cell.figures:
            return "finished"
        if cell.error:
            return "failed"
        return "unfinished" if self.path(cell).is_dir() else "waiting"

    def write(self, measures: Sequence[str]) -> None:
        """Writes `sweep.json`: every cell's figures, and those of each setting over its seeds."""
        plain = [
            {"name": c.name, "settings": c.settings, "seed": c.seed, "state": self.state(c)}
            | {"error": c.error, "commit": c.commit, "figures": c.figures}
            for c in self.cells
        ]
        found = {"run": self.script, "config": self.config, "settings": self.table(measures)}
        write_atomic(self.folder / FILE, to_json(found | {"cells": plain}, indent=1))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that any cell sets, in the order in which they were first swept."""
        return tuple(dict.fromkeys(field for cell in self.cells for field in cell.settings))

    def values(self, cell: Cell) -> tuple[Any, ...]:
        """The cell's values of `fields`, its own or those of the config."""
        return tuple(map(flat(cell.config).get, self.fields))

    def short(self, field: str) -> str:
        """A field's last name, unless another field has it too."""
        return short(field, self.config)

    def label(self, values: Sequence[Any], begin: int = 0) -> str:
        """Values of `fields` in words, from the field at `begin` on."""
        named = list(zip(self.fields, values, strict=True))[begin:]
        return ", ".join(f"{self.short(field)}={shown(value)}" for field, value in named)

    def settings(self) -> list[tuple[tuple[Any, ...], list[Cell]]]:
        """The finished cells of each setting, with its values of `fields`, in the order of these.

        Numbers are in their order, other values as they came.
        """
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            if cell.figures:
                groups.setdefault(to_json(self.values(cell)), []).append(cell)
        rows = [(self.values(cells[0]), cells) for cells in groups.values()]
        ranks = [order(column) for column in zip(*(values for values, _ in rows), strict=True)]
        place = lambda row: [r.index(v) for r, v in zip(ranks, row[0], strict=True)]  # noqa: E731
        return sorted(rows, key=place)

    def table(self, measures: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each setting, with each measure `over_seeds`."""
        return [
            {
                "setting": self.label(values),
                "values": dict(zip(self.fields, values, strict=True)),
                "seeds": [cell.seed for cell in cells],
                "measures": {
                    m: over_seeds([c.figures[m] for c in cells if c.figures.get(m) is not None])
                    for m in measures
                },
            }
            for values, cells in self.settings()
        ]

    def _require_same(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        lines = [line for name, line in changes(old, new).items() if name not in HARMLESS]
        if lines:
            raise ValueError(
                f"out={str(self.folder)!r}: its runs have another config than now: "
                f"{'; '.join(lines)}; restore these values or name another folder"
            )


def script_of(name: str, experiments: Path) -> str:
    """The script of an experiment, given by its path or by its name among `experiments`."""
    for path in (Path(name), experiments / f"{name}.py"):
        if path.is_file():
            return os.path.relpath(path)
    raise ValueError(
        f"run={name!r}: there is neither such a file nor {experiments / name}.py: give --run the "
        "path of an experiment"
    )


def require_measures(measures: Sequence[str]) -> None:
    """Refuses a measure that no run has."""
    known = (*SUMMARY_KEYS, "gain", *METRICS)
    for name in measures:
        if name not in known and "/" not in name:  # with one it is a metric, perhaps a new one
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use those of {', '.join(MEASURES)}"
            raise ValueError(f"measures={name!r}: runs have no such figure; {hint}")


def figures(folder: Path) -> dict[str, float]:
    """Numbers of a finished run, see `Cell.figures`; none of another."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not summary.get("finished"):
        return {}
    found = {k: v for row in read_metrics(folder) for k, v in row.items() if k != "step"} | summary
    found = {k: v for k, v in found.items() if type(v) in (int, float)}
    if {"heldout_pass_before", "heldout_pass_after"} <= found.keys():
        found["gain"] = found["heldout_pass_after"] - found["heldout_pass_before"]
    return found


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Values, one of each seed: median, mean, and the mean's interval of 95% by Student's t.

    There is no interval of one value; nothing is known of none.
    """
    if not values:
        return {"values": [], "median": None, "mean": None, "low": None, "high": None}
    low, high = student_interval(values) if len(values) > 1 else (None, None)
    middle = {"median": statistics.median(values), "mean": statistics.fmean(values)}
    return {"values": list(values), **middle, "low": low, "high": high}
