"""Base and adapter as one bf16 checkpoint."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.adapters.adapter import Adapter, merge
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.base import load_base, read_config
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.safetensors_io import open_checkpoint, open_file
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.checkpoint.write_merged import save_merged
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor, dequantize

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))

import write_peft_exports as exports  # noqa: E402

HF = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "torch_dtype": "float32",
}


@functools.cache
def base() -> dict:
    """Experts at 4 bits, the rest in bf16."""
    return toy.make_base(toy.MOE)


@functools.cache
def adapter() -> Adapter:
    return toy.make_adapter(base(), LoRA(4, 8.0), size=0.05)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The base's folder and the merged one, which has several files."""
    source, merged = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("merged")
    save_base(source, HF, base())
    for name in ("tokenizer.json", "tiktoken.model", "special_tokens_map.json", "README.md"):
        (source / name).write_text(name)
    save_merged(merged, source, adapter(), max_shard_bytes=100_000)
    return source, merged


@jax.jit
def plain(tree: dict) -> dict:
    is_packed = lambda node: isinstance(node, QTensor)  # noqa: E731
    return jax.tree.map(
        lambda w: dequantize(w, jnp.float32) if is_packed(w) else w, tree, is_leaf=is_packed
    )


def test_weights_are_base_and_update_rounded_once(folders):
    config, merged = load_base(folders[1])
    assert config == load_base(folders[0])[0]
    assert_merged(config, merged, adapter())


def assert_merged(config: ModelConfig, merged: dict, adapter: Adapter) -> None:
    wanted = jax.jit(lambda base, adapter: merge(adapter, plain(base)))(base(), adapter)
    for leaf, ours, exact in zip(
        *(jax.tree.leaves(x) for x in (layout(config), plain(merged), wanted)), strict=True
    ):
        expected = jnp.asarray(exact).astype(jnp.bfloat16).astype(jnp.float32)
        # The product of A and B may be summed in another order: one step of bf16 at most.
        gap = np.abs(np.asarray(ours, np.float32) - np.asarray(expected))
        assert (gap <= 2**-7 * np.abs(expected)).all(), leaf.modules[0]
        assert (gap > 0).mean() < 1e-3, leaf.modules[0]
        assert (gap == 0).all() or leaf.kind == "Linear"


def test_logprobs_are_those_of_training_within_bf16(folders):
    assert_logprobs(load_base(folders[1])[1], adapter())


@pytest.mark.parametrize("method", [OFT(8), OFT(16, shared="a"), LoRA(4, 8.0, shared="ab")])
def test_what_turns_inputs_or_is_shared_by_experts_is_merged_as_well(folders, tmp_path, method):
    adapter = toy.make_adapter(base(), method, size=0.05)
    save_merged(tmp_path, folders[0], adapter)
    config, merged = load_base(tmp_path)
    assert_merged(config, merged, adapter)
    if isinstance(method, OFT) and not method.shared:
        assert_logprobs(merged, adapter)


def assert_logprobs(merged: dict, adapter: Adapter) -> None:
    """As near as computing in bf16 comes to f32, and far from those without the adapter.

    Medians: rounding now and then moves a token to another expert.
    """
    rows = toy.Rows.draw(toy.MOE, 4, 32)
    stream, origin = rows.stream()

    def table(base: dict, adapter: Adapter | None, dtype: str = "bfloat16") -> np.ndarray:
        run = toy.training_forward(dataclasses.replace(toy.MOE, compute_dtype=dtype))
        return toy.table(rows, origin, run(base, adapter, stream, rows.temperature(origin)))

    trained, merged = table(base(), adapter), table(merged, None)
    noise = np.nanmedian(np.abs(table(base(), adapter, "float32") - trained))
    assert np.nanmedian(np.abs(merged - trained)) < 2 * noise < 0.05
    assert np.nanmedian(np.abs(table(base(), None) - trained)) > 0.1


def test_the_checkpoint_is_a_plain_one(folders):
    source, merged = folders
    config = json.loads((merged / "config.json").read_text())
    assert config == HF | {"torch_dtype": "bfloat16"}
    assert "quantization_config" in json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "tiktoken.model", "special_tokens_map.json"):
        assert (merged / name).read_text() == name
    assert not (merged / "README.md").exists()
    refs = open_checkpoint(merged)
    assert {ref.dtype.name for ref in refs.values()} == {"bfloat16"}
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(ref.nbytes for ref in refs.values())


def test_no_file_is_larger_than_asked_but_for_one_large_tensor(folders):
    files = sorted(folders[1].glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        refs = open_file(file)
        assert len(refs) == 1 or sum(ref.nbytes for ref in refs.values()) <= 100_000


def test_every_leaf_is_told_of(tmp_path, folders):
    told = []
    save_merged(tmp_path, folders[0], adapter(), tell=lambda *x: told.append(x))
    count = len(jax.tree.leaves(layout(toy.MOE)))
    assert told == [(i + 1, count) for i in range(count)]
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_what_is_not_adapted_keeps_its_type_and_its_bytes(tmp_path):
    source = GOLDENS / "qwen3_tied"  # of float32
    shapes = exports.shapes_of(read_config(source))
    save_merged(tmp_path, source, exports.drawn(shapes, LoRA(2, 4.0), ("q_proj",)))
    before, after = open_checkpoint(source), open_checkpoint(tmp_path)
    assert before.keys() == after.keys()
    for name, ref in after.items():
        if name.endswith("q_proj.weight"):
            assert ref.dtype.name == "bfloat16"
        else:
            np.testing.assert_array_equal(ref.map(), before[name].map())


def test_an_untied_head_and_a_tied_embedding_stay_as_they_are(tmp_path, folders):
    """No adapter is on either: a tied checkpoint has one of them before and after."""
    assert "lm_head.weight" not in open_checkpoint(folders[1])
    before, after = (open_checkpoint(f)["model.embed_tokens.weight"].map() for f in folders)
    np.testing.assert_array_equal(before.view(np.uint16), after.view(np.uint16))


def test_experts_that_stand_in_one_tensor_are_merged_in_their_rows(tmp_path):
    """gpt_oss: inputs before outputs, gate and up in every other row, biases untouched."""
    source = GOLDENS / "families" / "gpt_oss_no_window_small_limit"
    config, weights = load_base(source)
    made = exports.drawn(exports.shapes_of(config), LoRA(2, 4.0), ("up_proj", "q_proj"))
    save_merged(tmp_path, source, made)
    after, merged = load_base(tmp_path)
    assert after == config
    exact = jax.jit(lambda base, adapter: merge(adapter, plain(base)))(weights, made)
    for leaf, ours, wanted in zip(
        *(jax.tree.leaves(x) for x in (layout(config), plain(merged), exact)), strict=True
    ):
        wanted = np.asarray(wanted, np.float32)
        assert (np.abs(np.asarray(ours, np.float32) - wanted) <= 2**-8 * np.abs(wanted)).all(), leaf


def test_a_file_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no Hugging Face folder.*export the adapter alone"):
        save_merged(tmp_path / "out", tmp_path / "model.gguf", adapter())
    assert not (tmp_path / "out").exists()


def test_a_model_with_more_than_language_in_it_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25", "text_config": {}}')
    with pytest.raises(ValueError, match="'kimi_k25' has more in it than the language model"):
        save_merged(tmp_path / "out", tmp_path, adapter())
