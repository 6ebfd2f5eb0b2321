"""Weights & Biases by a stand-in for its package: what it is told, and what it cannot break."""

import json
import sys
from pathlib import Path

import pytest

from orbit_jax.config import from_config_dict
from orbit_jax.runs import wandb_run
from orbit_jax.runs.metrics import MetricsWriter, read_metrics

# Each call becomes a line of calls.jsonl beside it; what is named in `fails` raises.
PACKAGE = """
import json, pathlib
_here = pathlib.Path(__file__).parent

def _note(name, /, **given):
    with (_here / "calls.jsonl").open("a") as file:
        file.write(json.dumps([name, given]) + "\\n")
    if name in (_here / "fails").read_text():
        raise ConnectionError(f"no network in {name}")

class Settings:
    def __init__(self, **given):
        self.given = given

class _Run:
    def log(self, numbers, step):
        _note("log", numbers=numbers, step=step)
    def finish(self):
        _note("finish")

def init(*, settings, **given):
    _note("init", **settings.given, **given)
    return _Run()
"""
CONFIG = {"seed": 3, "run": {"wandb": "sums"}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a package `wandb` that can be imported."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(PACKAGE)
    (folder / "fails").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield folder
    sys.modules.pop("wandb", None)


def calls(package: Path) -> list:
    path = package / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def three_rows(folder: Path, start: int = 0) -> list[str]:
    """Writes rows of a run, with one that has a value that is not finite; what it was told."""
    folder.mkdir(exist_ok=True)
    told = []
    kept = read_metrics(folder)
    with MetricsWriter(folder, kept, wandb_run.begin(CONFIG, folder, told.append)) as metrics:
        for step in range(start, start + 3):
            metrics.write(step, {"reward/mean": step / 2, "bad": float("nan"), "note": "text"})
    return told


def test_a_run_has_its_counterpart(tmp_path: Path, package: Path):
    folder = tmp_path / "x-1"
    assert three_rows(folder) == []
    (name, begun), *rows, end = calls(package)
    assert name == "init"
    assert begun == {
        "project": "sums",
        "name": "x-1",
        "id": (folder / "wandb_id.txt").read_text(),
        "resume": "allow",
        "config": CONFIG,
        "dir": str(folder),
        "console": "off",
    }
    assert rows == [["log", {"numbers": {"reward/mean": i / 2}, "step": i}] for i in range(3)]
    assert end == ["finish", {}]


def test_a_resumed_run_goes_on_with_the_same_counterpart_wherever_its_folder_is(tmp_path, package):
    three_rows(tmp_path / "x-1")
    (tmp_path / "x-1").rename(tmp_path / "moved")
    three_rows(tmp_path / "moved", start=3)
    three_rows(tmp_path / "other")
    first, second, other = (given["id"] for name, given in calls(package) if name == "init")
    assert first == second != other


@pytest.mark.parametrize(("fails", "logged"), [("init", 0), ("log", 1), ("finish", 3)])
def test_its_failure_is_told_once_and_ends_nothing(tmp_path, package, fails, logged):
    (package / "fails").write_text(fails)
    told = three_rows(tmp_path / "x")
    assert told == [f"W&B: ConnectionError: no network in {fails}; the run goes on without it"]
    assert len(read_metrics(tmp_path / "x")) == 3
    assert [name for name, _ in calls(package)].count("log") == logged


def test_who_does_not_ask_imports_nothing(tmp_path: Path, package: Path):
    for run in ({"wandb": ""}, {}):
        assert wandb_run.begin({"run": run}, tmp_path, pytest.fail) is None
    wandb_run.require_installed("")
    assert "wandb" not in sys.modules
    assert not (tmp_path / "wandb_id.txt").exists()


@pytest.mark.parametrize("left_behind", [False, True])
def test_without_the_package_it_is_refused_at_the_door(tmp_path, monkeypatch, left_behind):
    """A folder `wandb` that earlier runs of others left where one stands is no package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if left_behind:
        (tmp_path / "wandb").mkdir()
    with pytest.raises(ValueError, match=r"run.wandb='sums': .* run 'pip install wandb', or leave"):
        wandb_run.require_installed("sums")


def test_a_project_has_a_name_that_can_be_one():
    assert from_config_dict({"run": {"wandb": "sums of three"}}).run.wandb == "sums of three"
    for name in ("a/b", "a#b", "x" * 129):
        with pytest.raises(ValueError, match=r"config.run.wandb='.*must be the name of a project"):
            from_config_dict({"run": {"wandb": name}})
