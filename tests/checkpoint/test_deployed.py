"""Folders of every way of quantising: values, bytes, what is left unread, what is refused."""

import json
from pathlib import Path

import deployed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deployed import CASES, Case

from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.checkpoint.huggingface import load_base, open_base, read_config
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.safetensors_io import SINGLE_FILE, read_json, write_safetensors
from orbit_jax.checkpoint.scheme import PLAIN
from orbit_jax.quant.qtensor import QTensor, dequantize

every_case = pytest.mark.parametrize("name", CASES)
widen = jax.jit(dequantize, static_argnums=1)


def written(name: str, folder: Path) -> tuple[Case, dict[str, np.ndarray]]:
    case = CASES[name]()
    return case, deployed.write(case, folder)


@every_case
def test_every_weight_has_the_values_of_its_tensors(name: str, tmp_path: Path):
    case, tensors = written(name, tmp_path)
    config, base = load_base(tmp_path)
    leaves = jax.tree.leaves(layout(config))
    weights = jax.tree.leaves(base, is_leaf=lambda node: isinstance(node, QTensor))
    formats = set()
    for leaf, weight in zip(leaves, weights, strict=True):
        scheme = case.scheme(leaf)
        formats.add(scheme.format)
        wide = widen(weight, jnp.float32) if isinstance(weight, QTensor) else weight
        assert isinstance(weight, QTensor) == (leaf.kind != "Vector")
        assert wide.shape == (*leaf.lead, *leaf.shape)
        for index in np.ndindex(leaf.lead):
            expected = deployed.values(leaf, index, scheme, tensors)
            np.testing.assert_array_equal(wide[index], expected, leaf.modules[0])
    assert len(formats) == (1 if name == "gpt_oss_plain" else 2)


@every_case
def test_what_is_left_unread_is_listed(name: str, tmp_path: Path):
    case, tensors = written(name, tmp_path)
    contents = open_base(tmp_path)
    assert set(contents.unread) == case.extra.keys()
    assert contents.nbytes == sum(t.nbytes for n, t in tensors.items() if n not in case.extra)
    assert contents.config == read_config(tmp_path)


@every_case
def test_a_base_holds_little_more_than_its_tensors(name: str, tmp_path: Path):
    """The tables of NVFP4 weigh at these widths only: test_formats has wider ones."""
    _, tensors = written(name, tmp_path)
    tables = 1024 * 40 if "nvfp4" in name else 0
    assert (
        base_bytes(load_base(tmp_path)[1])
        <= 1.02 * sum(t.nbytes for t in tensors.values()) + tables
    )


def test_a_model_reads_the_same_out_of_shards(tmp_path: Path):
    case = CASES["gpt_oss"]()
    deployed.write(case, tmp_path / "one")
    deployed.write(case, tmp_path / "three", shards=3)
    one, three = (load_base(tmp_path / folder)[1] for folder in ("one", "three"))
    jax.tree.map(np.testing.assert_array_equal, one, three)


def test_a_model_below_model_language_model_is_found(tmp_path: Path):
    _, tensors = written("gpt_oss_plain", tmp_path)
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    expected = load_base(tmp_path)[1]
    write_safetensors(tmp_path / SINGLE_FILE, renamed)
    jax.tree.map(np.testing.assert_array_equal, load_base(tmp_path)[1], expected)
    renamed["model.norm.weight"] = tensors["model.norm.weight"]
    write_safetensors(tmp_path / SINGLE_FILE, renamed)
    with pytest.raises(ValueError, match=r"model.*norm.weight are the same weight: remove one"):
        load_base(tmp_path)


def test_layers_of_other_formats_are_stacks_of_their_own(tmp_path: Path):
    """Some layers quantised, others not: told by their tensors alone."""
    case = CASES["deepseek"]()
    scheme = case.scheme
    case = Case(
        case.hf,
        lambda leaf: PLAIN if ".2." in leaf.modules[0] else scheme(leaf),
        scale_type="float32",
    )
    _write_by_layer(case, tmp_path, lambda layer: layer == 1)
    config, base = load_base(tmp_path)
    assert config.sparse == (False, True, True)
    assert config.splits == (2,)
    kinds = [stack["self_attn"]["o_proj"].format for stack in base["layers"]]
    assert kinds == ["bfloat16", "e4m3", "bfloat16"]


def _write_by_layer(case: Case, folder: Path, is_quantised) -> None:
    """Two folders of the same model, one of them plain, mixed layer by layer."""
    own = deployed.write(case, folder)
    plain = deployed.write(Case(case.hf, lambda leaf: PLAIN), folder)

    def layer(name: str) -> int:
        return int(name.split(".")[2]) if name.startswith("model.layers.") else -1

    mixed = {n: t for n, t in own.items() if is_quantised(layer(n))}
    mixed |= {n: t for n, t in plain.items() if not is_quantised(layer(n))}
    write_safetensors(folder / SINGLE_FILE, mixed)


# Bad input: one thing is changed, and the sentence must name it.


def config_with(folder: Path, **changes) -> None:
    hf = read_json(folder / "config.json")
    hf["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "bits=3 is not supported"),
        ("gptq", {"sym": 0}, "sym=0 is not supported"),
        ("gptq", {"group_size": 0}, "group_size=0 must be a positive number or -1"),
        ("gptq", {"group_size": 48}, "input width 64 is not a multiple of 48"),
        ("gptq", {"group_size": 64}, r"qzeros has shape \[2, 8\], not \[1, 8\]"),
        ("gptq", {"sym": True}, r"experts.0.down_proj: qzeros are not all in the middle"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq", {"dynamic": {"(": {"bits": 8}}}, r"dynamic names the pattern '\('"),
        ("gptq", {"quant_method": "awq", "version": "gemm"}, "qweight has shape"),
        ("awq", {"bits": 8}, "bits=8 is not supported"),
        ("awq", {"version": "gemv"}, "version='gemv' is not supported"),
        ("awq", {"zero_point": False}, "zero_point=False is not supported"),
        ("deepseek", {"weight_block_size": [16, 24]}, r"weight_block_size=\[16, 24\] is not supp"),
        ("deepseek", {"weight_block_size": [32, 16]}, "weight_scale_inv has shape"),
        ("deepseek", {"weight_block_size": None}, "weight_scale_inv has shape"),
        ("deepseek", {"fmt": "e3m4"}, "fmt='e3m4' is not supported"),
        ("modelopt_fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ' is not supported"),
        ("ct_fp8_block", {"config_groups": []}, r"config_groups=\[\] must be an object"),
        ("ct_fp8_block", {"ignore": "lm_head"}, "ignore='lm_head' must be a list of names"),
        ("ct_fp8_block", {"ignore": ["re:("]}, r"the target 're:\(' is no pattern"),
        ("ct_int8", {"format": "dense"}, "format='dense' is not supported"),
        ("gpt_oss", {"quant_method": "fp8"}, "unknown: .*gate_up_proj_blocks"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(name, changes, message, tmp_path: Path):
    written(name, tmp_path)
    config_with(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_base(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tensor_of_guesses_is_known_only_where_the_model_has_them(tmp_path: Path):
    _, tensors = written("deepseek", tmp_path)
    tensors["model.layers.4.eh_proj.weight"] = np.ones(1, np.float32)
    write_safetensors(tmp_path / SINGLE_FILE, tensors)
    with pytest.raises(ValueError, match=r"unknown: model.layers.4.eh_proj.weight"):
        load_base(tmp_path)


def test_a_quantised_weight_without_its_scale_is_refused(tmp_path: Path):
    _, tensors = written("deepseek", tmp_path)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    write_safetensors(tmp_path / SINGLE_FILE, tensors)
    with pytest.raises(ValueError, match=r"o_proj.weight has type float8_e4m3fn, not bfloat16"):
        load_base(tmp_path)


def test_two_configurations_must_agree(tmp_path: Path):
    case, _ = written("kimi", tmp_path)
    hf = case.hf | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=r"text_config.quantization_config contradict each other"):
        load_base(tmp_path)


def test_own_rules_of_gptq_change_single_modules(tmp_path: Path):
    """GPTQModel's `dynamic`: other groups for modules that a pattern names."""
    written("gptq", tmp_path)
    config_with(tmp_path, dynamic={"-:.*lm_head": {}, r"+:.*q_proj$": {"group_size": 64}})
    with pytest.raises(
        ValueError, match=r"q_proj.qzeros has shape \[2, 8\], not \[1, 8\]"
    ) as error:
        load_base(tmp_path)
    assert "k_proj" not in str(error.value)
