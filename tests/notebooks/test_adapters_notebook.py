"""The notebook of adapters runs from top to bottom in a small setting."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
QUICK = """import jax
jax.config.update("jax_compilation_cache_dir", %r)  # its runs share what they compile
STEPS = 2
ARMS = {"LoRA 16": {}, "OFT 8": {"method": "oft", "block_size": 8}}
OVERRIDES = {
    "sampler.prompts_per_step": 8,
    "sampler.group_size": 2,
    "ppo.token_buckets": (1.0,),
    "task.train_problems": 64,
    "task.heldout_problems": 8,
    "task.unseen_problems": 8,
    "run.root": %r,
}"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of the notebook server's own packages
def test_the_notebook_of_adapters_runs_in_a_quick_setting(tmp_path: Path, compiled_programs: Path):
    notebook = nbformat.read(ROOT / "notebooks" / "adapters.ipynb", as_version=4)
    parameters = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source = QUICK % (str(compiled_programs), str(tmp_path / "runs"))
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "10,280,956,928" in printed  # LoRA of rank 16 everywhere on Kimi-K2
    (row,) = [line for line in printed.splitlines() if line.startswith("OFT 8  ") and "%" in line]
    assert row.split()[-2] == "0"  # its largest gap
    assert "OFT 8: " in printed
    assert "blocks, median" in printed
