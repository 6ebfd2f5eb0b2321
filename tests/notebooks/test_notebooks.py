"""The notebooks run from top to bottom, in settings that are small enough for a test."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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
