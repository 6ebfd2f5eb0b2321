"""Checkpoints told by their headers: bytes as loaded, adapters, every refusal."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.base import base_bytes, load_base
from orbit_jax.checkpoint.inspection import Inspection, inspect
from orbit_jax.checkpoint.language_tensors import unread_part
from orbit_jax.checkpoint.safetensors_io import (
    SINGLE_FILE,
    open_checkpoint,
    write_safetensors,
)

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests/goldens"
TINY = ROOT / "orbit_jax/assets/tiny_moe_int4"
FOLDERS = [
    *(f"families/{name}" for name in ("deepseek_v3", "gpt_oss", "mixtral_window_tied")),
    *("int4_asymmetric", "int8", "qwen3_tied"),
    *sorted(f"deployed/{path.name}" for path in (GOLDENS / "deployed").iterdir()),
]


def rows(found: Inspection, name: str) -> list[tuple[str, str]]:
    return [(group.layers, group.format) for group in found.weights if group.name == name]


def copied(name: str, folder: Path, **changes: object) -> Path:
    """A golden with other fields in its config."""
    shutil.copytree(GOLDENS / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_bytes_and_parameters_are_those_of_the_loaded_base(name: str):
    found = inspect(GOLDENS / name)
    assert found.loads
    _, base = load_base(GOLDENS / name)
    assert found.packed_bytes == base_bytes(base)
    used = set(open_checkpoint(GOLDENS / name)) - {n for u in found.unread for n in u.tensors}
    refs = open_checkpoint(GOLDENS / name)
    assert found.read_bytes == sum(refs[n].nbytes for n in used)
    assert found.file_bytes > found.read_bytes


def test_zero_codes_in_the_middle_are_not_held(tmp_path: Path):
    folder = copied("deployed/qwen3_moe_gptq", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: np.array(ref.map()) for n, ref in open_checkpoint(folder).items()}
    zeros = {n: np.full_like(t, 0x77777777) for n, t in tensors.items() if n.endswith("qzeros")}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / SINGLE_FILE, tensors | zeros)
    _, base = load_base(folder)
    assert inspect(folder).packed_bytes == base_bytes(base)


@pytest.mark.parametrize("name", ["simple.gguf", "k_quants.gguf"])
def test_bytes_of_a_gguf_file_are_those_of_the_loaded_base(name: str):
    found = inspect(GOLDENS / "gguf" / name)
    assert (found.kind, found.loads) == ("GGUF file", True)
    _, base = load_base(GOLDENS / "gguf" / name)
    assert found.packed_bytes == found.read_bytes == base_bytes(base)
    assert all(group.bytes_per_weight > 0 for group in found.weights)


def test_layers_of_one_format_are_one_row_and_formats_are_told_apart():
    found = inspect(GOLDENS / "families/deepseek_v3")
    assert rows(found, "self_attn.o_proj") == [("0-2", "bfloat16")]
    assert rows(found, "mlp.experts.up_proj") == [("1-2", "bfloat16")]
    assert rows(found, "lm_head") == [("", "bfloat16")]
    mixed = rows(inspect(GOLDENS / "deployed/llama_int4_first_layer_plain"), "mlp.up_proj")
    assert [layers for layers, _ in mixed] == ["0", "1-2"]
    assert mixed[0][1] in ("bfloat16", "float32")
    assert mixed[1][1].startswith("pack-quantized (4 bits")


def test_an_embedding_counts_as_active_only_where_it_is_the_head():
    apart, tied = inspect(GOLDENS / "qwen3_moe"), inspect(GOLDENS / "qwen3_tied")
    embedding = next(group for group in apart.weights if group.name == "embed_tokens")
    experts = sum(g.parameters for g in apart.weights if ".experts." in g.name)
    config = apart.config
    visited = experts * config.top_k // config.num_experts
    assert apart.active_parameters == (apart.parameters - embedding.parameters - experts + visited)
    assert tied.active_parameters == tied.parameters


def test_what_is_left_unread_is_told_by_part_with_its_names():
    found = inspect(GOLDENS / "families/kimi_k25")
    assert {part.part for part in found.unread} == {"mm_projector", "vision_tower"}
    for part in found.unread:
        assert all(name.startswith(part.part) for name in part.tensors)
        assert part.file_bytes > 0


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.61.embed_tokens.weight", "model.layers.61"),
        ("language_model.model.layers.61.eh_proj.weight", "language_model.model.layers.61"),
        ("model.layers.0.mlp.up_proj.input_scale", "*.input_scale"),
        ("vision_tower.encoder.layers.3.norm.weight", "vision_tower"),
        ("model.visual.blocks.0.weight", "model.visual"),
    ],
)
def test_further_layers_scales_and_other_senses_are_parts(name: str, part: str):
    assert unread_part(name) == part


@pytest.mark.parametrize("method", [LoRA(4, 8.0), OFT(4), OFT(16, shared="a")])
def test_an_adapter_takes_what_it_takes_when_attached(method):
    targets = ("q_proj", "experts.down_proj")
    found = inspect(TINY, method, targets)
    _, base = load_base(TINY)
    adapter = jax.jit(lambda: attach(method, jax.random.key(0), base, targets))()
    params = jax.tree.leaves(adapter.params)
    copy = jax.tree.leaves(jax.jit(lambda a: a.prepared().cast(jnp.bfloat16))(adapter).params)
    assert found.adapter.parameters == sum(p.size for p in params)
    assert found.adapter.copy_bytes == sum(p.nbytes for p in copy)
    assert found.adapter.state_bytes == sum(3 * p.nbytes for p in params)
    counts = {weight.name: (weight.count, weight.size) for weight in found.adapter.weights}
    size = method.rank if isinstance(method, LoRA) else method.block_size
    assert counts == {"self_attn.q_proj": (3, size), "mlp.experts.down_proj": (24, size)}
    assert {"mlp.gate", "embed_tokens", "mlp.experts.up_proj"} <= set(found.left_alone)
    assert "self_attn.q_proj" not in found.left_alone


def test_an_adapters_matrices_are_counted_over_all_stacks():
    found = inspect(GOLDENS / "families/deepseek_v3", LoRA(2, 4.0), ("o_proj",))
    (weight,) = found.adapter.weights
    assert (weight.count, weight.parameters) == (3, 3 * 2 * (32 + 40))


@pytest.mark.parametrize(
    ("rank", "targets", "reason"),
    [
        (4, ("gate",), "a router is never adapted"),
        (4, ("q_proj", "query"), "match no weight"),
        (4096, ("q_proj",), "exceeds the model's width 128: lower it"),
    ],
)
def test_an_adapter_that_cannot_be_attached_is_refused_apart(rank, targets, reason):
    found = inspect(TINY, LoRA(rank, 1.0), targets)
    assert found.loads
    assert found.adapter is None
    assert reason in found.adapter_refusal


def test_a_tokenizer_is_told_and_its_lack_is_no_refusal(tmp_path: Path):
    told = inspect(TINY).tokenizer
    assert (told.ids, told.eos_ids, told.has_chat_template, told.refusal) == (261, (258,), True, "")
    assert "neither tokenizer.json nor" in inspect(GOLDENS / "qwen3_moe").tokenizer.refusal
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"0": {}}}')
    found = inspect(tmp_path)  # what reading it raises is no ValueError
    assert "KeyError" in found.tokenizer.refusal
    assert found.loads


def test_faults_of_config_quantisation_and_files_are_told_together(tmp_path: Path):
    folder = copied(
        "llama_sharded", tmp_path, model_type="unheard", quantization_config={"quant_method": "odd"}
    )
    first, last = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-8])
    last.unlink()
    found = inspect(folder)
    assert not found.loads
    assert len(found.refusals) == 4
    for reason in ("model_type='unheard'", "quant_method='odd'", "truncated", last.name):
        assert sum(reason in sentence for sentence in found.refusals) == 1, reason
    assert found.config is None


def test_tensors_that_do_not_fit_are_told_beside_what_the_config_says(tmp_path: Path):
    folder = copied("qwen3_moe", tmp_path)
    tensors = {n: np.array(ref.map()) for n, ref in open_checkpoint(folder).items()}
    tensors["stray"] = tensors.pop("model.norm.weight")
    write_safetensors(folder / SINGLE_FILE, tensors)
    found = inspect(folder, LoRA(2, 4.0))
    (sentence,) = found.refusals
    assert "missing: model.norm.weight; unknown: stray" in sentence
    assert found.description["family"] == "qwen3_moe"
    assert found.adapter.parameters > 0
    assert (found.weights, found.parameters) == ((), 0)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf"])
def test_what_is_not_there_is_one_sentence(name: str, tmp_path: Path):
    found = inspect(tmp_path / name)
    assert len(found.refusals) == 1
    assert found.file_bytes == 0


def test_a_gguf_file_with_wrong_tensors_still_says_what_it_is(tmp_path: Path):
    data = (GOLDENS / "gguf/simple.gguf").read_bytes()
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data.replace(b"blk.0.attn_norm.weight", b"blk.0.atta_norm.weight"))
    found = inspect(path)
    assert "attn_norm" in found.refusals[0]
    assert found.description["layers"] == "2: 2 dense (0-1)"
