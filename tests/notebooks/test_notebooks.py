"""The notebooks run from top to bottom, in settings that are small enough for a test."""

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from configs import tiny_moe
from orbit_jax.checkpoint import run_state
from orbit_jax.config import from_config_dict, to_dict
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.plots import GAP

ROOT = Path(__file__).parents[2]
# The sizes of the `test` variant, whose programs the tests of the experiment have compiled.
SMALL = """import jax
jax.config.update("jax_compilation_cache_dir", {compiled!r})  # its runs share what they compile
OVERRIDES = {{
    "sampler.prompts_per_step": 8,
    "sampler.group_size": 2,
    "ppo.token_buckets": (1.0,),
    "task.train_problems": 64,
    "task.heldout_problems": 8,
    "task.unseen_problems": 8,
    "run.root": {runs!r},
}}
"""
GAPS = ((1, 0.0), (2, 3e-4), (3, 0.0))  # of the steps of a run
# Those of the notebook server's own packages.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def printed(tmp_path: Path, compiled_programs: Path):
    """What a notebook prints, with its cell of parameters replaced."""

    def run(name: str, parameters: str) -> str:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
        small = SMALL.format(compiled=str(compiled_programs), runs=str(tmp_path / "runs"))
        cell.source = small + parameters
        resources = {"metadata": {"path": str(ROOT / "notebooks")}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
        return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))

    return run


def test_the_tour_runs_in_a_quick_setting(printed):
    text = printed("tour.ipynb", "STEPS = 1\nRANKS = (2,)")
    assert "largest log-prob gap: 0" in text
    assert "rank 16: reward" in text


@pytest.mark.long
def test_the_notebook_of_adapters_runs_in_a_quick_setting(printed):
    arms = {"LoRA 16": {}, "OFT 8": {"method": "oft", "block_size": 8}}
    text = printed("adapters.ipynb", f"STEPS = 2\nARMS = {arms}")
    assert "10,280,956,928" in text  # LoRA of rank 16 everywhere on Kimi-K2
    (row,) = [line for line in text.splitlines() if line.startswith("OFT 8  ") and "%" in line]
    assert row.split()[-2] == "0"  # its largest gap
    assert "OFT 8: " in text
    assert "blocks, median" in text


@pytest.mark.long
def test_the_notebook_of_the_gap_finds_causes_and_none_here(printed):
    text = printed("log_prob_gap.ipynb", "STEPS = 1")
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines() if " of " in line}
    for label in ("this project", "this project, 4 rows at once"):
        assert rows[label][0] == "0"  # tokens with a gap
    for label in ("trainer in f32", "adapter merged, INT4", "yardstick: one update"):
        assert int(rows[label][0]) > 0
    assert "as sampled: gap 0, update made: True" in text
    assert "update made: False" in text.partition("one bit moved")[2]


@pytest.mark.long
def test_the_notebook_of_formats_puts_them_in_order(printed):
    formats = ("bf16", "int8 32", "int4 128", "nvfp4")
    parameters = f"FORMATS = {formats}\nSPREAD, DRAWS, STEPS = 0.5, 1, 1"
    text = printed("group_size_and_bits.ipynb", parameters)
    mean = {form: _number(text, rf"{form} +(\d\S*e\S+) ") for form in formats}
    assert mean["bf16"] == 0 < mean["int8 32"] < mean["nvfp4"] < mean["int4 128"]
    bits = {form: _number(text, rf"{form} +[\d,]{{6,}} +(\S+) ") for form in formats}
    assert bits == {"bf16": 16.0, "int8 32": 8.5, "int4 128": 4.14, "nvfp4": 5.17}
    for form in formats:
        assert _number(text, rf"{form} +\S+% +\S+% +(\S+)") == 0  # the log-prob gap


@pytest.mark.long
def test_the_notebook_of_run_folders_makes_a_run_and_does_a_part_of_it_again(printed):
    text = printed("reading_a_run.ipynb", 'RUN = ""\nSTEPS = 3\nAGAIN = True')
    assert "  steps: 60 -> 3" in text
    assert "gap exactly 0 at 3 of 3 steps" in text
    assert "newest that is whole: step_000003; passed over: []" in text
    assert "3 rows written again, after step 1" in text
    for what in ("each step once", "metrics", "samples", "state"):
        assert f"  {what}: True" in text


def test_the_notebook_of_run_folders_reads_one_that_is_there(printed, tmp_path):
    config = to_dict(from_config_dict(tiny_moe.get_config("test")))
    folder = RunFolder.create(tmp_path / "runs", "ppo_math", config)
    rows = [{"step": i, "reward/mean": i / 8, GAP: gap, "parity/tokens": 50.0} for i, gap in GAPS]
    (folder.path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ids = {"prompt_ids": [49, 43, 50], "ids": [51, 52, 258], "sampled": [True, False, True]}
    said = {"logprobs": [-0.5, -0.1], "reward": None, "outcome": "infra_failure"}
    folder.write_samples(1, [ids | said])
    run_state.save(folder.checkpoints, 3, {"adapter": np.ones(4)}, {}, keep_last=1)
    (folder.checkpoints / "step_000004.half").mkdir()

    text = printed("reading_a_run.ipynb", f"RUN = {str(folder.path)!r}\nSTEPS, AGAIN = 0, False")
    assert "  steps: 60 -> 2" in text
    assert "gap exactly 0 at 2 of 3 steps, 150 tokens" in text
    assert "step_000001.jsonl: 1 samples" in text
    assert "newest that is whole: step_000003; passed over: ['step_000004.half']" in text
    assert "written again" not in text


def _number(text: str, pattern: str) -> float:
    """The one number that a line of the text has at a place."""
    (found,) = re.findall(f"^{pattern}", text, re.MULTILINE)
    return float(found)
