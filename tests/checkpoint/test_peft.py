"""Adapters that PEFT wrote, and that PEFT read, against what it computed with them."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.adapters.adapter import Adapter, at, merge
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.adapter_facts import adapter_facts
from orbit_jax.checkpoint.base import read_config
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.checkpoint.peft_sites import linear_leaves
from orbit_jax.checkpoint.safetensors_io import open_checkpoint, open_file, read_json
from orbit_jax.checkpoint.write_peft import save_adapter
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.qtensor import from_float

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))

import write_peft_exports as exports  # noqa: E402

FOLDERS = sorted((GOLDENS / "peft").glob("*/*"))
NAMES = [f"{folder.parent.name}/{folder.name}" for folder in FOLDERS]
EXPORTS = sorted(exports.CASES)


@functools.cache
def load(name: str) -> tuple[ModelConfig, Path, Adapter]:
    folder = GOLDENS / "peft" / name
    base = GOLDENS / read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    config = read_config(base)
    return config, base, load_adapter(folder, config)


def deltas(config: ModelConfig, adapter: Adapter) -> dict:
    """The base's tree with what the adapter adds to every weight; zeros where it adds nothing."""
    zeros = jax.tree.map(
        lambda leaf: np.zeros((*leaf.lead, *leaf.shape), np.float32), layout(config)
    )
    return jax.tree.map(np.asarray, jax.jit(merge)(adapter, zeros))


def assert_same_deltas(config: ModelConfig, adapter: Adapter, expected: dict) -> None:
    """Bit for bit; every delta of `expected` is used, and where there is none there are zeros."""
    used = set()
    for tree, leaves in zip(deltas(config, adapter)["layers"], linear_leaves(config), strict=True):
        for path, leaf in leaves.items():
            ours = at(tree, *path)
            for i, module in enumerate(leaf.modules if not leaf.fused else ()):
                mine = ours.reshape(-1, *leaf.shape)[i]
                if module in expected:
                    used.add(module)
                    np.testing.assert_array_equal(mine, expected[module])
                elif ".experts." not in module:
                    assert not mine.any(), module
            if "experts" not in path:
                continue
            for l in range(leaf.lead[0]):
                first = leaf.modules[l * len(leaf.modules) // leaf.lead[0]].split(".")[2]
                name = "down_proj" if path[-1] == "down_proj" else "gate_up_proj"
                parameter = f"model.layers.{first}.mlp.experts.{name}"
                if parameter not in expected:
                    assert not ours[l].any(), parameter
                    continue
                used.add(parameter)
                whole, half = expected[parameter], leaf.shape[0]
                rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
                if config.family == "gpt_oss":
                    rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                theirs = whole[:, rows.get(path[-1], slice(None))]
                np.testing.assert_array_equal(ours[l], theirs, err_msg=parameter)
    assert used == expected.keys()


def reference(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """PEFT's deltas, and the tokens and log-probs of the adapted model."""
    arrays = dict(np.load(GOLDENS / "peft" / name / "reference.npz"))
    return arrays, arrays.pop("tokens"), arrays.pop("logprobs")


def plain_base(path: Path, config: ModelConfig) -> dict:
    """A checkpoint of plain floats as a base, read without the loader."""
    refs = open_checkpoint(path)

    def stack(leaf: Leaf):
        rows = slice(None) if leaf.rows is None else slice(leaf.rows[0], None, leaf.rows[1])
        parts = [refs[f"{module}.{leaf.parameter}"].map() for module in leaf.modules]
        if leaf.fused:
            parts = [p.swapaxes(1, -1)[:, rows] for p in parts]
        whole = np.stack(parts).reshape(*leaf.lead, *leaf.shape)
        return whole if leaf.kind == "Vector" else from_float(np.ascontiguousarray(whole))

    return jax.tree.map(stack, layout(config))


def forward(config: ModelConfig, base: dict, adapter: Adapter | None, tokens: np.ndarray):
    """Log-probs `[B, T, V]` after each token, in f32."""
    config = dataclasses.replace(config, compute_dtype="float32")
    rows, positions = np.indices(tokens.shape, np.int32)
    flat = (jnp.asarray(x.reshape(-1)) for x in (tokens, rows, positions))
    stream = Stream(*flat, num_rows=tokens.shape[0], num_slots=tokens.shape[1])

    @functools.partial(jax.jit, compiler_options=toy.QUICK)
    def run(base: dict, adapter: Adapter | None, stream: Stream) -> jax.Array:
        hidden, _, _ = apply(config, base, adapter, stream)
        return jax.nn.log_softmax(logits(config, base, hidden))

    return np.asarray(run(base, adapter, stream)).reshape(*tokens.shape, -1)


def test_the_goldens_cover_layouts_and_families():
    families = {load(name)[0].family for name in NAMES}
    assert families == {"qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}
    assert {name.partition("/")[0] for name in NAMES} == {"written", "exports"}
    assert {name.partition("/")[2] for name in NAMES if "exports" in name} == set(EXPORTS)


@pytest.mark.parametrize("name", NAMES)
def test_deltas_are_those_of_peft_bit_for_bit(name):
    config, _, adapter = load(name)
    assert_same_deltas(config, adapter, reference(name)[0])


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_peft(name):
    config, path, adapter = load(name)
    _, tokens, expected = reference(name)
    ours = forward(config, plain_base(path, config), adapter, tokens)
    assert np.abs(ours - expected).max() < 1e-4


def test_an_imported_adapter_on_experts_alone_is_felt():
    config, path, adapter = load("written/down_alone")
    _, tokens, expected = reference("written/down_alone")
    assert [set(stack) for stack in adapter.params["layers"]] == [{"mlp"}]
    bare = forward(config, plain_base(path, config), None, tokens)
    assert np.abs(bare - expected).max() > 0.1


def test_a_model_inside_another_keeps_its_own_names(tmp_path):
    """Kimi-K2.5: the language model's modules stand under `language_model.`."""
    config, path = read_config(GOLDENS / "families/kimi_k25"), GOLDENS / "families/kimi_k25"
    methods = (("kv_b_proj", LoRA(1, 4.0)),)
    targets = ("kv_b_proj", "mlp.gate_proj", "experts.down_proj")
    before = exports.drawn(exports.shapes_of(config), LoRA(2, 4.0), targets, methods)
    facts = adapter_facts(config, path, before, base="kimi", base_hash="1", step=0)
    for how in ("per_module", "fused"):
        save_adapter(tmp_path, before, config, facts, layout=how, wrapper="language_model.")
        keys = open_file(tmp_path / "adapter_model.safetensors")
        inside = "base_model.model.language_model.model.layers."
        assert all(key.startswith(inside) for key in keys)
        after = load_adapter(tmp_path, config)
        jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
        assert after.method_at("self_attn", "kv_b_proj") == LoRA(1, 4.0)


@pytest.mark.parametrize("case", EXPORTS)
def test_what_peft_accepted_is_still_what_is_written(case, tmp_path):
    exports.write(case, tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors", "orbit.json"):
        golden = GOLDENS / "peft" / "exports" / case / name
        assert (tmp_path / name).read_bytes() == golden.read_bytes(), name


@pytest.mark.parametrize("case", EXPORTS)
def test_what_is_written_is_read_back_bit_for_bit(case, tmp_path):
    config, _, base_hash = exports.base_of(case)
    before = exports.adapter_of(case)
    exports.write(case, tmp_path)
    after = load_adapter(tmp_path, config, base_hash)
    assert after.method == before.method
    fused = config.family == "gpt_oss" or exports.CASES[case][2].get("layout") == "fused"
    for mine, theirs in zip(before.params["layers"], after.params["layers"], strict=True):
        for path in linear_leaves(config)[0] | linear_leaves(config)[-1]:
            there = at(mine, *path)
            assert (at(theirs, *path) is None) == (there is None), path
            if there is None or (fused and "experts" in path):
                continue  # gate and up have become one weight: the deltas are compared below
            assert after.method_at(*path) == before.method_at(*path)
            for side in "ab":
                np.testing.assert_array_equal(at(theirs, *path)[side], there[side])
    for a, b in zip(
        jax.tree.leaves(deltas(config, before)), jax.tree.leaves(deltas(config, after)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
