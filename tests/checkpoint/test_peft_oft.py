"""Rotations that PEFT wrote, and that PEFT read, against what it computed with them."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from orbit_jax.adapters.adapter import at
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.base import read_config
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.checkpoint.peft_sites import linear_leaves
from orbit_jax.checkpoint.safetensors_io import read_json
from orbit_jax.checkpoint.write_peft import save_adapter

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "goldens")]

import write_peft_exports as exports  # noqa: E402
from test_peft import forward, plain_base  # noqa: E402

GOLDENS = Path(__file__).parents[1] / "goldens"
FOLDERS = sorted((GOLDENS / "peft_oft").glob("*/*"))
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
WRITTEN = {folder.name: folder for folder in FOLDERS if folder.parent.name == "written"}
FACTS = {"base": "qwen3_tied", "base_hash": "1"}


def load(folder: Path):
    base = GOLDENS / read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    config = read_config(base)
    return config, base, load_adapter(folder, config), dict(np.load(folder / "reference.npz"))


def test_both_series_and_both_ways_of_sharing_blocks_come_from_peft():
    methods = {name: load(folder)[2].method for name, folder in WRITTEN.items()}
    assert methods == {
        "blocks": OFT(8),
        "exact_by_number": OFT(16, neumann_terms=0),
        "shared_blocks": OFT(4, neumann_terms=6, block_share=True),
    }


@each_folder
def test_rotations_are_those_of_peft_and_not_their_inverses(folder):
    config, _, adapter, expected = load(folder)
    used = set()
    for tree, leaves in zip(adapter.params["layers"], linear_leaves(config), strict=True):
        for path, leaf in leaves.items():
            if not (params := at(tree, *path)):
                continue
            width = leaf.shape[1]
            eye = np.broadcast_to(np.eye(width, dtype=np.float32), (*leaf.lead, width, width))
            turned = np.asarray(jax.jit(adapter.method_at(*path).merge)(params, eye))
            for module, ours in zip(leaf.modules, turned.reshape(-1, *eye.shape[-2:]), strict=True):
                used.add(module)
                np.testing.assert_allclose(ours.T, expected[module], atol=2e-6)
                assert np.abs(ours - expected[module]).max() > 0.05
    assert used == expected.keys() - {"tokens", "logprobs"}


@each_folder
def test_logprobs_are_those_of_peft(folder):
    config, base, adapter, expected = load(folder)
    ours = forward(config, plain_base(base, config), adapter, expected["tokens"])
    assert np.abs(ours - expected["logprobs"]).max() < 1e-4
    bare = forward(config, plain_base(base, config), None, expected["tokens"])
    assert np.abs(bare - expected["logprobs"]).max() > 0.02


@pytest.mark.parametrize("case", sorted(exports.ROTATIONS))
def test_what_peft_accepted_is_still_what_is_written_and_is_read_back(case, tmp_path):
    exports.write(case, tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors", "orbit.json"):
        golden = GOLDENS / "peft_oft" / "exports" / case / name
        assert (tmp_path / name).read_bytes() == golden.read_bytes(), name
    before, after = exports.adapter_of(case), load_adapter(tmp_path, exports.base_of(case)[0])
    assert (after.method, after.overrides) == (before.method, ())
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_what_experts_share_is_written_for_each_of_them(tmp_path):
    config = read_config(GOLDENS / "qwen3_moe")
    targets = ("experts.gate_proj", "experts.down_proj")
    before = exports.drawn(exports.shapes_of(config), OFT(4, shared="a"), targets)
    save_adapter(tmp_path, before, config, FACTS)
    after = load_adapter(tmp_path, config)
    assert after.method == OFT(4)
    for one, each in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert one.shape[1] == 1
        np.testing.assert_array_equal(np.broadcast_to(one, each.shape), each)


@pytest.mark.parametrize(
    ("base", "method", "targets", "overrides", "settings", "sentence"),
    [
        ("qwen3_tied", OFT(8), ("q_proj", "o_proj"), (("o_proj", OFT(4)),), {}, "one block size"),
        ("qwen3_moe", OFT(4), ("o_proj",), (), {"layout": "fused"}, "PEFT rotates modules only"),
        (
            "families/gpt_oss_no_window_small_limit",
            OFT(4),
            ("experts.up_proj",),
            (),
            {},
            "holds experts as parameters, which PEFT cannot rotate",
        ),
    ],
)
def test_what_peft_has_no_words_for_is_refused(
    tmp_path, base, method, targets, overrides, settings, sentence
):
    config = read_config(GOLDENS / base)
    adapter = exports.drawn(exports.shapes_of(config), method, targets, overrides)
    with pytest.raises(ValueError, match=sentence):
        save_adapter(tmp_path, adapter, config, FACTS, **settings)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"coft": True}, "coft=True may change the update"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True may change"),
        ({"bias": "oft_only"}, "bias='oft_only' may change"),
        ({"r": 4}, "r=4 and oft_block_size=8: one of them must be 0"),
        ({"r": 0, "oft_block_size": 0}, "one of them must be 0, the other not"),
        ({"oft_block_size": 8.5}, "oft_block_size=8.5: must be a whole number"),
        ({"r": 5, "oft_block_size": 0}, "r=5 does not divide an input width of 32"),
        ({"oft_block_size": 16}, r"has shape \[4, 28\], not \[2, 120\]"),
        ({"block_share": True}, r"has shape \[4, 28\], not \[1, 28\]"),
        ({"num_cayley_neumann_terms": 3}, "neumann_terms=3: use at least 4"),
        ({"target_modules": ["q_proj", "k_proj"]}, "missing: .*k_proj.oft_R.weight"),
    ],
)
def test_a_config_that_means_something_else_is_refused(tmp_path, fields, sentence):
    shutil.copytree(WRITTEN["blocks"], tmp_path, dirs_exist_ok=True)
    config = read_json(tmp_path / "adapter_config.json") | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        load_adapter(tmp_path, read_config(GOLDENS / "qwen3_tied"))
