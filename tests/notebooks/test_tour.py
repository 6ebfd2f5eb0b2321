"""The notebook runs from top to bottom, in a setting that is small enough for a test."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
# The sizes of the `test` variant, whose programs the tests of the experiment have compiled.
QUICK = """import jax
jax.config.update("jax_compilation_cache_dir", %r)  # its runs share what they compile
STEPS = 1
RANKS = (2,)
OVERRIDES = {
    "sampler.prompts_per_step": 8,
    "sampler.group_size": 2,
    "ppo.token_buckets": (1.0,),
    "task.train_problems": 64,
    "task.heldout_problems": 8,
    "task.unseen_problems": 8,
    "run.root": %r,
}"""


@pytest.mark.filterwarnings("ignore")  # those of the notebook server's own packages
def test_the_tour_runs_in_a_quick_setting(tmp_path: Path, compiled_programs: Path):
    notebook = nbformat.read(ROOT / "notebooks" / "tour.ipynb", as_version=4)
    parameters = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source = QUICK % (str(compiled_programs), str(tmp_path / "runs"))
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "largest log-prob gap: 0" in printed
    assert "rank 16: reward" in printed
