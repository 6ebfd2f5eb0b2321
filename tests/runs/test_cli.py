"""The command line: what runs, what is refused in one sentence, what keeps its traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
from orbit_jax.rl.packing import pack
from orbit_jax.runs.cli import main

def run(config, resume, change):
    if resume == "refused":
        pack([(0, 0, [1, 2, 3])], 1, 1, 2)
    if resume == "slip":
        pack([(0, 0)], 1, 1, 2)
    if resume == "own":
        raise ValueError("a bug of mine")
    print("ran with seed", config.seed, resume, *change)

main(run, "configs/tiny_moe.py")
"""
CASES = {
    "defaults": [],
    "overrides": [
        "--config",
        "configs/tiny_moe.py:gae",
        "--config.seed=7",
        "--resume=x",
        "--change=a,b",
    ],
    "help": ["--help"],
    "no file": ["--config=configs/nothing.py"],
    "no field": ["--config.sampler.group_sise=4"],
    "no variant": ["--config=configs/tiny_moe.py:huge"],
    "no number": ["--config.seed=many"],
    "no sense": ["--config.steps=0"],
    "no flag": ["--recume=x"],
    "left over": ["runs/ppo_math-1"],
    "refused": ["--resume=refused"],
    "slip": ["--resume=slip"],
    "own": ["--resume=own"],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Exit status, output and errors of each case."""
    script = tmp_path_factory.mktemp("cli") / "experiment.py"
    script.write_text(EXPERIMENT)
    run = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {k: subprocess.Popen([sys.executable, script, *a], **run) for k, a in CASES.items()}
    return {k: (p.wait(), *p.communicate()) for k, p in processes.items()}


def test_the_run_gets_recipe_overrides_and_resume(ended):
    assert ended["defaults"] == (0, "ran with seed 0 \n", "")
    assert ended["overrides"] == (0, "ran with seed 7 x a b\n", "")


def test_help_names_the_flags(ended):
    _, out, _ = ended["help"]
    assert "--config" in out
    assert "--resume" in out


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("no file", "--config=configs/nothing.py: no such file; give one like configs/tiny_moe.py"),
        ("no field", "group_sise"),
        ("no variant", "tiny_moe has no variant 'huge': use gae, mesh8 or test"),
        ("no number", "many"),
        ("no sense", "config.steps=0: must be above 0"),
        ("no flag", "recume"),
        (
            "left over",
            "'runs/ppo_math-1' stands alone: is --config or --resume or --change missing?",
        ),
        ("refused", "pack: shard 0 holds more than 2 tokens"),
    ],
)
def test_a_mistake_ends_in_one_line(ended, case, sentence):
    status, out, errors = ended[case]
    assert status == 2
    assert out == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert sentence in errors


@pytest.mark.parametrize(
    ("case", "last_line"),
    [
        ("slip", "ValueError: not enough values to unpack (expected 3, got 2)"),
        ("own", "ValueError: a bug of mine"),
    ],
)
def test_an_error_in_the_code_keeps_its_traceback(ended, case, last_line):
    status, _, errors = ended[case]
    assert status == 1
    assert "Traceback" in errors
    assert errors.splitlines()[-1] == last_line
