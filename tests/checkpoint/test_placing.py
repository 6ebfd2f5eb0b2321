"""Filling arrays where they stay: values on a mesh, and what the host holds meanwhile."""

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import deployed
import jax
import numpy as np
import pytest
from deployed import CASES, Case

from orbit_jax.checkpoint import placing
from orbit_jax.checkpoint.huggingface import load_base
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.leaf_tensors import expected_tensors
from orbit_jax.checkpoint.placing import Filling, Placement
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE
from orbit_jax.checkpoint.scheme import PLAIN
from orbit_jax.model.config import ModelConfig

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "configs/models"
RANDOM = ("deepseek_r1_tiny", "gpt_oss_120b_tiny")  # FP8 in blocks, MXFP4


def in_worker(*arguments: str | Path) -> object:
    """What placing_worker.py prints, in a process of eight devices."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests/checkpoint/placing_worker.py", *arguments],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("on_device", [False, True])
def test_pieces_land_where_they_begin(on_device: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placing, "_SMALL", 0)
    expected = np.arange(2 * 3 * 6 * 4).reshape(2, 3, 6, 4).astype(np.uint8)
    filling = Filling(expected.shape, np.uint8, on_device=on_device)
    for index in np.ndindex(2, 3):
        for row in (0, 4):
            filling.write((*index, row), expected[index][row : row + 4])
    array = filling.finish()
    assert isinstance(array, jax.Array)
    np.testing.assert_array_equal(array, expected)


def test_a_base_has_the_same_bits_whether_it_is_filled_on_the_device_or_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(placing, "_SMALL", 0)
    deployed.write(CASES["gpt_oss"](), tmp_path)
    _, host = load_base(tmp_path)
    _, device = load_base(tmp_path, Placement(on_device=True))
    assert jax.tree.structure(host) == jax.tree.structure(device)
    jax.tree.map(np.testing.assert_array_equal, host, device)


@pytest.fixture(scope="module")
def different_on_a_mesh(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Weights whose values on a mesh are not those on one device."""
    folders = [MODELS / name for name in RANDOM]
    for name in ("ct_fp8_block", "modelopt_fp8", "gptq_act_order", "awq", "ct_nvfp4", "gpt_oss"):
        case = CASES[name]()
        changes = {"num_hidden_layers": 1}
        if name == "gpt_oss":
            changes = {"num_local_experts": 8, "num_key_value_heads": 4}
        case = Case(case.hf | changes, case.scheme)
        folders.append(tmp_path_factory.mktemp(name))
        deployed.write(case, folders[-1])
    return in_worker("values", *folders)


def test_every_format_has_the_same_values_on_a_mesh(different_on_a_mesh: list[str]):
    """Blocks of rows that straddle devices, scales that all rows share, groups of columns."""
    assert [weight for weight in different_on_a_mesh if str(MODELS) not in weight] == []


def test_random_weights_do_not_depend_on_the_mesh(different_on_a_mesh: list[str]):
    assert [weight for weight in different_on_a_mesh if str(MODELS) in weight] == []


def write_zeros(folder: Path, hf: dict, shards: int) -> None:
    """A plain checkpoint that takes no room on the disk: its files are holes."""
    files: dict[str, dict] = defaultdict(dict)
    for leaf in jax.tree.leaves(layout(ModelConfig.from_hf(hf))):
        for module in leaf.modules:
            for name, stored in expected_tensors(leaf, module, PLAIN).items():
                entries = files[f"model-{len(name) % shards}.safetensors"]
                begin = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
                end = begin + 2 * math.prod(stored.shapes[0])
                entries[name] = {
                    "dtype": "BF16",
                    "shape": stored.shapes[0],
                    "data_offsets": [begin, end],
                }
    for file, entries in files.items():
        text = json.dumps(entries).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(out.tell() + max(entry["data_offsets"][1] for entry in entries.values()))
    weight_map = {name: file for file, entries in files.items() for name in entries}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_host_holds_a_few_tensors_besides_the_arrays(where: str, tmp_path: Path):
    """0.7 GB on eight devices; 1.9 GB of the same kind needed no more."""
    experts = {"num_experts": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    hf = deployed.small("qwen3_moe", hidden_size=2048, vocab_size=16384, **experts)
    write_zeros(tmp_path, hf | {"num_hidden_layers": 1}, shards=3)
    found = in_worker("memory", tmp_path, where)
    assert found["base_bytes"] > 600e6
    assert found["over_bytes"] < {"host": 100e6, "device": 200e6}[where]
