"""Evaluating what a run made of the tiny base, in the `test` variant of its recipe."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT)]

import evaluate  # noqa: E402

from configs import tiny_moe  # noqa: E402
from orbit_jax import startup, trained  # noqa: E402
from orbit_jax.checkpoint import run_state  # noqa: E402
from orbit_jax.config import from_config_dict, to_dict  # noqa: E402
from orbit_jax.runs import evaluations  # noqa: E402
from orbit_jax.runs.folder import RunFolder  # noqa: E402
from orbit_jax.tasks import comparison, evaluation  # noqa: E402
from orbit_jax.tasks.evaluation import Settings  # noqa: E402

SAMPLES = 3


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run that has saved its adapter before it learned anything."""
    recipe = tiny_moe.get_config("test")
    recipe.base.path = str(ROOT / recipe.base.path)
    # A small program, for prompts of one length of streams.
    recipe.adapter.targets, recipe.sampler.slots = ("o_proj",), 1
    config = from_config_dict(recipe)
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "ppo_math", to_dict(config))
    frozen = startup.load(config)
    state = startup.train_state(config, frozen)
    run_state.save(folder.checkpoints, 7, state, {"base_hash": frozen.hash}, 1)
    return folder.path


@pytest.fixture(scope="module")
def evaluated(run) -> dict:
    """Four held-out problems and eight unseen ones; in several rounds of one slot."""
    config = trained.config_of(run, {"task.heldout_problems": 4, "run.root": str(run.parent)})
    out = str(run.parent / "evaluated")
    return evaluate.evaluate(config, Settings(SAMPLES), ["heldout", "unseen"], str(run), out)


def test_measures_are_those_of_the_samples_that_are_written(evaluated):
    folder = Path(evaluated["folder"])
    found = json.loads((folder / "results.json").read_text())
    assert found["name"].endswith("step 7")
    table = {(r["split"], r["difficulty"], r["measure"]): r for r in found["table"]}
    for split, problems in (("heldout", 4), ("unseen", 8)):
        for mode, count, measure in (("greedy", 1, "greedy"), ("sampled", SAMPLES, "pass@1")):
            lines = (folder / "samples" / f"{split}_{mode}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            assert len(rows) == problems * count
            row = table[split, "", measure]
            assert row["problems"] == problems
            assert row["value"] == pytest.approx(sum(r["value"] for r in rows) / len(rows))
            assert row["low"] <= row["value"] <= row["high"]
            assert {r["outcome"] for r in rows} <= {"scored", "parse_failure", "truncated"}
    sampled = {str(r["turns"]) for r in rows}
    assert len(sampled) > problems  # not the same one for all samples of a problem
    assert {"config.json", "environment.json", "log.txt"} <= {p.name for p in folder.iterdir()}


def test_how_far_it_is_is_told(evaluated):
    log = (Path(evaluated["folder"]) / "log.txt").read_text()
    total = 12 * (1 + SAMPLES)
    assert "4 heldout and 8 unseen problems" in log
    assert f"completions {total}/{total} 100%" in log


def test_the_table_is_printed(evaluated, capsys):
    evaluations.show(evaluated, evaluation.shown(evaluated["table"]), ["wrote it"])
    lines = capsys.readouterr().out.splitlines()
    heads = ["split", "problems", "greedy", "pass@1", "pass@3", "majority@3"]
    assert lines[2].split() == heads
    assert lines[-1] == "wrote it"
    assert any(line.startswith("unseen  ") for line in lines)


def test_an_evaluation_does_not_differ_from_itself(evaluated):
    rows = comparison.compare(*comparison.read_two([evaluated["folder"]] * 2))
    assert {row["difference"] for row in rows} == {0.0}
    assert {row["p_value"] for row in rows} == {1.0}


def test_a_folder_that_exists_is_refused_before_the_base_is_loaded(run, monkeypatch):
    monkeypatch.setattr(startup, "load", None)
    config = trained.config_of(run, {"task.heldout_problems": 4})
    with pytest.raises(ValueError, match="already exists: name a new folder"):
        evaluate.evaluate(config, Settings(0), ["heldout"], out=str(run))


def test_fields_of_a_runs_config_may_be_overridden(run):
    config = trained.config_of(run, {"sampler.slots": 8, "mesh.processes": 1})
    assert config.sampler.slots == 8
    assert config.experiment == "ppo_math"
    with pytest.raises(ValueError, match=r"config.sampler.slots=-1"):
        trained.config_of(run, {"sampler.slots": -1})


def test_an_adapter_of_another_base_is_refused(run):
    config = trained.config_of(run)
    frozen = dataclasses.replace(startup.load(config), hash="another")
    with pytest.raises(ValueError, match=r"step_000007 was trained on the base with hash \w{12}, "):
        trained.load_policy(run / "checkpoints" / "step_000007", config, frozen)


def test_compared_evaluations_may_stand_apart(capsys):
    assert evaluate.checked(["x", "--compare", "a", "b"]) == ["x", "--compare=a,b"]
    assert evaluate.checked(["x", "--run=a"]) == ["x", "--run=a"]
    with pytest.raises(SystemExit) as stopped:
        evaluate.checked(["x", "--run", "a", "--config=b.py"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --run has a config of its own: leave --config out\n"


def test_the_command_line_answers_in_sentences():
    cases = {
        ("--help",): (1, "--compare"),  # absl's own status
        ("--compare",): (2, "error: --compare takes two evaluations, got 0"),
        ("--run", "/nowhere"): (2, "error: /nowhere is no run folder"),
    }
    script = [sys.executable, ROOT / "experiments/evaluate.py"]
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = {case: subprocess.Popen([*script, *case], **pipes) for case in cases}
    ended = {case: (process.communicate()[0], process.wait()) for case, process in running.items()}
    for case, (status, sentence) in cases.items():
        out, code = ended[case]
        assert code == status, (case, out)
        assert sentence in out
        assert "Traceback" not in out
