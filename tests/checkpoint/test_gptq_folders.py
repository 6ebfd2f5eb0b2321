"""GPTQ folders whose configuration and tensors do not go together, or say things twice."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from orbit_jax.checkpoint.base import load_base
from orbit_jax.checkpoint.safetensors_io import open_file, write_safetensors

DEPLOYED = Path(__file__).parents[1] / "goldens" / "deployed"


def test_act_order_without_the_groups_of_columns_is_refused(tmp_path: Path):
    folder = shutil.copytree(DEPLOYED / "llama_gptq_act_order", tmp_path / "model")
    file = folder / "model.safetensors"
    kept = {n: np.array(r.map()) for n, r in open_file(file).items() if not n.endswith("g_idx")}
    write_safetensors(file, kept)
    with pytest.raises(ValueError, match=r"desc_act=true but \S+ has no g_idx"):
        load_base(folder)


def test_of_dynamic_patterns_the_first_that_matches_counts(tmp_path: Path):
    folder = shutil.copytree(DEPLOYED / "qwen3_moe_gptq", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    patterns = {r"+:.*_proj$": {"group_size": 16}, r"+:.*": {"group_size": 32}}
    config["quantization_config"]["dynamic"] = patterns
    (folder / "config.json").write_text(json.dumps(config))
    ours, plain = (load_base(path)[1] for path in (folder, DEPLOYED / "qwen3_moe_gptq"))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
