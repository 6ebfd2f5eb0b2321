"""GGUF models: bits, log-probs by decoding, memory, and what is refused."""

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_writer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from gguf_writer import Tensors, read_all, write_gguf
from jax.sharding import SingleDeviceSharding

from orbit_jax import startup
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.base import base_bytes, base_hash, load_base, read_config
from orbit_jax.checkpoint.gguf_file import GGUFTensor, open_gguf
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.config import Config
from orbit_jax.quant.qtensor import QTensor, dequantize

GOLDENS = Path(__file__).parents[1] / "goldens/gguf"
SIMPLE = GOLDENS / "simple.gguf"
every_golden = pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.gguf")), ids=lambda p: p.stem)
widen = jax.jit(dequantize, static_argnums=1)


@every_golden
def test_weights_are_the_bits_that_transformers_reads(path: Path):
    """Decoded in f32, with the rows of queries and keys in Hugging Face's order."""
    config, base = load_base(path)
    leaves = jax.tree.leaves(layout(config))
    weights = jax.tree.leaves(base, is_leaf=lambda node: isinstance(node, QTensor))
    digests = {}
    for leaf, weight in zip(leaves, weights, strict=True):
        wide = widen(weight, jnp.float32) if isinstance(weight, QTensor) else weight
        for module, index in zip(leaf.modules, np.ndindex(leaf.lead), strict=True):
            digests[module] = hashlib.sha256(np.asarray(wide[index]).tobytes()).hexdigest()
    assert digests == json.loads(path.with_suffix(".json").read_text())["sha256"]


@every_golden
def test_decoding_token_by_token_equals_the_full_forward(path: Path):
    config, base = load_base(path)
    adapter = toy.make_adapter(base, LoRA(4, 8.0), ("q_proj", "down_proj"))
    rows = toy.Rows.draw(config, 3, 24)
    stream, origin = rows.stream()
    logprobs = toy.training_forward(config)(base, adapter, stream, rows.temperature(origin))
    full = toy.table(rows, origin, logprobs)
    decoded = toy.cached_table(config, base, adapter, rows, [9, 0, 4])
    assert np.nanstd(full) > 1
    assert toy.largest_gap(full, decoded) == 0.0


@every_golden
def test_a_base_takes_no_more_than_its_file(path: Path):
    stored = sum(tensor.nbytes for tensor in open_gguf(path).tensors.values())
    assert base_bytes(load_base(path)[1]) == stored


def test_the_config_is_that_of_the_metadata():
    config, _ = load_base(SIMPLE)
    assert (config.family, config.num_layers, config.vocab_size) == ("llama", 2, 271)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.hidden_size, config.intermediate_size) == (64, 96)
    assert (config.rope.theta, config.max_positions) == (5000.0, 64)
    assert np.float32(config.rms_norm_eps) == np.float32(1e-6)
    assert not config.tie_word_embeddings
    wide, _ = load_base(GOLDENS / "k_quants.gguf")
    assert (wide.head_dim, wide.hidden_size) == (32, 256)
    assert wide.tie_word_embeddings


def test_a_run_starts_from_a_file_as_from_a_folder():
    fields = {"max_prompt_tokens": 8, "max_completion_tokens": 8}
    recipe = dataclasses.replace(
        Config(),
        base=dataclasses.replace(Config().base, path=str(SIMPLE), working_copy="never"),
        sampler=dataclasses.replace(Config().sampler, **fields),
    )
    frozen = startup.load(recipe)
    assert frozen.model == load_base(SIMPLE)[0]
    assert frozen.packed_bytes == base_bytes(frozen.base)
    assert frozen.hash == base_hash(SIMPLE)
    assert frozen.tokenizer.eos_ids == (2,)


def test_every_array_is_placed_by_its_path_in_the_base_and_progress_is_told():
    placed, told = [], []

    def sharding(path: str, shape: tuple[int, ...]) -> SingleDeviceSharding:
        placed.append(path)
        return SingleDeviceSharding(jax.devices()[0])

    path = GOLDENS / "k_quants.gguf"
    placement = Placement(sharding, lambda done, total: told.append((done, total)))
    _, base = load_base(path, placement)
    with_paths = jax.tree_util.tree_leaves_with_path(base)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in with_paths]
    assert placed == names
    assert "layers.0.self_attn.q_proj.minimum.codes" in placed
    assert told[-1] == (sum(tensor.nbytes for tensor in open_gguf(path).tensors.values()),) * 2


def test_stacks_begin_where_the_type_changes(tmp_path: Path):
    """As the mixes of llama-quantize have it: more bits for some layers."""
    metadata, tensors = read_all(SIMPLE)
    tensors[DOWN] = zeros(Q8_0, 96, 64)
    path = write_gguf(tmp_path / "mixed.gguf", metadata, tensors)
    config, base = load_base(path)
    assert config.splits == (1,)
    assert config == read_config(path)
    assert [stack["mlp"]["down_proj"].format for stack in base["layers"]] == ["int4", "int8"]
    whole = load_base(SIMPLE)[1]["layers"][0]["self_attn"]
    for i, stack in enumerate(base["layers"]):
        for got, all_layers in zip(*map(jax.tree.leaves, (stack["self_attn"], whole)), strict=True):
            np.testing.assert_array_equal(got, all_layers[i : i + 1])


def test_the_header_is_read_without_the_tensors():
    tracemalloc.start()
    file = open_gguf(SIMPLE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file.tensors) == 2 * 9 + 3
    assert peak < SIMPLE.stat().st_size / 2


def test_loading_holds_the_base_and_little_besides(tmp_path: Path):
    metadata, tensors = read_all(SIMPLE)
    for name in ("token_embd.weight", "output.weight"):
        kind, widths, data = tensors[name]
        tensors[name] = (kind, [widths[0], widths[1] * 100], data * 100)
    metadata["llama.vocab_size"] *= 100
    path = write_gguf(tmp_path / "large.gguf", metadata, tensors)
    load_base(path)  # what JAX allocates once is not what is measured
    tracemalloc.start()
    _, base = load_base(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert base_bytes(base) > 8e6
    assert peak < base_bytes(base) + 2.2e6, "the base and one tensor, unpacked"


def test_the_hash_follows_every_byte_and_not_the_name(tmp_path: Path):
    data = SIMPLE.read_bytes()
    (tmp_path / "other.gguf").write_bytes(data)
    assert base_hash(tmp_path / "other.gguf") == base_hash(SIMPLE)
    (tmp_path / "other.gguf").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert base_hash(tmp_path / "other.gguf") != base_hash(SIMPLE)
    with pytest.raises(ValueError, match=r"none\.gguf is missing"):
        base_hash(tmp_path / "none.gguf")


def test_formats_that_a_folder_does_not_have_are_not_saved_as_one(tmp_path: Path):
    _, base = load_base(GOLDENS / "k_quants.gguf")
    hf = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    }
    with pytest.raises(
        ValueError, match=r"weight of int6 .* has no spelling in compressed-tensors"
    ):
        save_base(tmp_path, hf, base)


# Bad input: a golden is read, one thing is changed, and the sentence must name it.

Change = Callable[[dict[str, Any], Tensors], object]
UP, DOWN = "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"
Q8_0 = 8


def zeros(kind: int, *widths: int) -> tuple[int, list[int], bytes]:
    """A tensor of zeros, its row's width first."""
    block = gguf_writer.TYPES[kind]
    return kind, list(widths), bytes(int(np.prod(widths)) // block.elements * block.nbytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: t.pop(UP), f"missing: {UP}"),
        (lambda m, t: t.pop("output_norm.weight"), "missing: output_norm.weight"),
        (lambda m, t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
        (lambda m, t: t.update({"rope_freqs.weight": zeros(0, 8)}), "unknown: rope_freqs.weight"),
        (lambda m, t: t.update({UP: zeros(0, 64, 95)}), rf"{UP} has shape \[95, 64\], not \[96,"),
        (
            lambda m, t: t.update({"output_norm.weight": zeros(Q8_0, 64)}),
            "output_norm.weight has type Q8_0, not F32, F16 or BF16",
        ),
        (lambda m, t: m.update({"general.architecture": "mamba"}), "architecture='mamba' is not"),
        (lambda m, t: m.pop("general.architecture"), "general.architecture is missing"),
        (lambda m, t: m.pop("llama.block_count"), "llama.block_count is missing"),
        (lambda m, t: m.update({"llama.block_count": "2"}), "llama.block_count=2 has the wrong ty"),
        (lambda m, t: m.update({"llama.block_count": True}), "block_count=True has the wrong type"),
        (lambda m, t: m.update({"llama.expert_count": 8}), "llama.expert_count=8 is not supported"),
        (
            lambda m, t: m.update({"llama.rope.scaling.type": "yarn"}),
            "type='yarn' is not supported",
        ),
        (lambda m, t: m.update({"llama.logit_scale": 2.0}), "llama.logit_scale=2.0 may change"),
        (lambda m, t: m.update({"llama.rope.dimension_count": 8}), "count=8 differs from the head"),
        (lambda m, t: m.update({"llama.attention.head_count_kv": 3}), "num_key_value_heads=3"),
        (lambda m, t: m.update({"llama.vocab_size": 9}), "tokenizer has 271 tokens, the model 9"),
        (lambda m, t: m.update({"split.count": 3}), "is one of 3 parts: merge them"),
    ],
)
def test_what_does_not_fit_is_named_before_a_weight_is_read(
    change: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    metadata, tensors = read_all(SIMPLE)
    change(metadata, tensors)
    path = write_gguf(tmp_path / "changed.gguf", metadata, tensors)
    monkeypatch.setattr(GGUFTensor, "map", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message) as error:
        load_base(path)
    assert str(path) in str(error.value)


def test_neutral_metadata_and_other_keys_are_let_through(tmp_path: Path):
    metadata, tensors = read_all(SIMPLE)
    metadata |= {"llama.expert_count": 0, "llama.rope.scaling.type": "none", "general.name": "a"}
    del metadata["llama.vocab_size"], metadata["llama.rope.dimension_count"]
    path = write_gguf(tmp_path / "changed.gguf", metadata, tensors)
    assert load_base(path)[0] == load_base(SIMPLE)[0]
