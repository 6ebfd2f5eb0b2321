"""What an imported adapter is refused for, and the scales and ranks that are made one exactly."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.adapter_facts import adapter_facts, quantised_weights
from orbit_jax.checkpoint.base import read_config
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.checkpoint.peft_config import read_peft_config, scale_ratio
from orbit_jax.checkpoint.safetensors_io import open_file, write_safetensors
from orbit_jax.checkpoint.write_peft import save_adapter

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))

import write_peft_exports as exports  # noqa: E402

DENSE, MOE = read_config(GOLDENS / "qwen3_tied"), read_config(GOLDENS / "qwen3_moe")
Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
FACTS = {"base": "b", "base_hash": "1"}


def folder_of(tmp_path: Path, case: str = "written/dense_patterns") -> Path:
    return Path(shutil.copytree(GOLDENS / "peft" / case, tmp_path / "adapter"))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    refs = open_file(folder / "adapter_model.safetensors")
    return {name: np.array(ref.map()) for name, ref in refs.items()}


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **fields) -> Path:
    """A PEFT folder with these tensors and fields."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "peft_version": "0.21.2"} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def queries(*ranks: int) -> dict[str, np.ndarray]:
    """A and B of every layer's queries, of these ranks, full of ones."""
    return {
        Q.format(layer, side): np.ones((rank, 32) if side == "A" else (32, rank), np.float32)
        for layer, rank in enumerate(ranks)
        for side in "AB"
    }


def refused(folder: Path, config=DENSE) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        load_adapter(folder, config)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("model.layers.0.self_attn.q_prj.lora_A.weight", "no such weight"),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", "no such weight"),
        ("model.layers.0.self_attn.q_norm.lora_A.weight", "no such weight"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "biases are not supported"),
        ("model.layers.0.mlp.gate.lora_A.weight", "a router is never adapted"),
        ("model.layers.0.mlp.router.lora_A.weight", "a router is never adapted"),
        ("lm_head.lora_A.weight", "the head is never adapted"),
        ("model.embed_tokens.lora_embedding_A", "an embedding is never adapted"),
        ("model.norm.modules_to_save.weight", "a weight of its own"),
    ],
)
def test_a_key_of_anything_but_a_linear_weight_is_refused_by_name(tmp_path, key, reason):
    tensors = queries(2, 2) | {f"base_model.model.{key}": np.ones((2, 32), np.float32)}
    message = refused(write_adapter(tmp_path, tensors))
    assert re.search(rf"unknown: base_model\.model\.{re.escape(key)} \({reason}", message)


def test_every_unknown_missing_and_misshapen_key_is_listed(tmp_path):
    folder = folder_of(tmp_path)
    tensors = tensors_of(folder)
    lost = tensors.pop(Q.format(0, "B"))
    tensors[Q.format(1, "B")] = lost.T
    tensors["base_model.model.model.layers.0.mlp.dwn_proj.lora_A.weight"] = lost
    down = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    tensors[down] = tensors[down].astype(np.int32)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    message = refused(folder)
    assert "unknown: base_model.model.model.layers.0.mlp.dwn_proj.lora_A.weight" in message
    assert f"missing: {Q.format(0, 'B')};" in message
    assert f"{Q.format(1, 'B')} has shape [2, 32], not [32, 1]" in message
    assert f"{down} has type int32" in message


def test_a_layer_without_its_share_is_missing(tmp_path):
    message = refused(write_adapter(tmp_path, queries(2)))
    assert f"missing: {Q.format(1, 'A')}, {Q.format(1, 'B')}" in message


def test_a_target_without_keys_is_missing(tmp_path):
    message = refused(write_adapter(tmp_path, queries(2, 2), target_modules=["q_proj", "v_proj"]))
    assert "missing: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight" in message
    folder = folder_of(tmp_path, "written/experts_fused")
    tensors = {n: x for n, x in tensors_of(folder).items() if "base_layer" in n or "o_proj" in n}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    assert "missing: base_model.model.model.layers.0.mlp.experts.lora_A.weight" in refused(
        folder, MOE
    )


def test_no_match_at_all_is_an_error(tmp_path):
    tensors = {name.replace("base_model.model.", ""): x for name, x in queries(2, 2).items()}
    assert "none of its 4 keys" in refused(write_adapter(tmp_path, tensors))
    assert "no tensors" in refused(write_adapter(tmp_path, {}))


def test_a_pattern_never_reaches_a_longer_name(tmp_path):
    """`mlp.gate` is the router's name and not `mlp.gate_proj`'s."""
    gate = {
        name.replace("self_attn.q_proj", "mlp.gate_proj"): x for name, x in queries(2, 2).items()
    }
    folder = write_adapter(tmp_path, gate, rank_pattern={"mlp.gate": 7, "gate_pro": 7})
    assert load_adapter(folder, DENSE).method_at("mlp", "gate_proj") == LoRA(2, 4.0)
    message = refused(write_adapter(tmp_path, queries(2, 2), target_parameters=["mlp.gate.weight"]))
    assert "target_parameters names 'mlp.gate.weight'" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("trainable_token_indices", [1]),
        ("invented_next_year", {"x": 1}),
    ],
)
def test_a_config_that_changes_the_update_is_refused(tmp_path, field, value):
    message = refused(write_adapter(tmp_path, queries(2, 2), **{field: value}))
    assert f"{field}={value!r} may change the update" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA'"),
        ({"peft_type": None}, "peft_type=None"),
        ({"r": 0}, "r=0: must be a whole number"),
        ({"r": 2.0}, "r=2.0: must be a whole number"),
        ({"lora_alpha": -1}, "lora_alpha=-1: must be a number above 0"),
        ({"rank_pattern": {"q_proj": "4"}}, r"rank_pattern['q_proj']='4'"),
        ({"alpha_pattern": {"q_(": 4}}, "'q_(' is no regular expression"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path, fields, message):
    assert message in refused(write_adapter(tmp_path, queries(2, 2), **fields))


def test_the_scale_is_alpha_over_rank_or_over_its_root(tmp_path):
    folder = write_adapter(tmp_path, queries(8, 8), r=8, lora_alpha=16)
    assert load_adapter(folder, DENSE).method_at("self_attn", "q_proj").scale == 2.0
    folder = write_adapter(tmp_path, queries(8, 8), r=8, lora_alpha=16, use_rslora=True)
    method = load_adapter(folder, DENSE).method_at("self_attn", "q_proj")
    assert method.scale == pytest.approx(5.657, abs=5e-4)


def test_the_first_pattern_that_matches_counts(tmp_path):
    fields = {"rank_pattern": {"self_attn.q_proj": 4, "q_proj": 3}, "alpha_pattern": {"q_proj": 8}}
    write_adapter(tmp_path, queries(4, 4), **fields)
    config = read_peft_config(tmp_path)
    assert config.method_of("model.layers.0.self_attn.q_proj") == LoRA(4, 8.0)
    assert config.method_of("model.layers.0.self_attn.k_proj") == LoRA(2, 4.0)


def test_ranks_of_one_stack_are_padded_and_scales_folded_by_powers_of_two(tmp_path):
    fields = {"rank_pattern": {"layers.0.self_attn.q_proj": 1}, "alpha_pattern": {"0.+q_proj": 1}}
    adapter = load_adapter(write_adapter(tmp_path, queries(1, 2), **fields), DENSE)
    assert adapter.method_at("self_attn", "q_proj") == LoRA(2, 4.0)  # of layer 1: scale 2
    params = adapter.params["layers"][0]["self_attn"]["q_proj"]
    np.testing.assert_array_equal(params["a"][0], [[1.0] * 32, [0.0] * 32])
    np.testing.assert_array_equal(params["b"][0], [[0.5, 0.0]] * 32)  # its scale was 1
    np.testing.assert_array_equal(params["b"][1], np.ones((32, 2)))


def test_scales_of_one_stack_that_do_not_fold_exactly_are_refused(tmp_path):
    fields = {"alpha_pattern": {"layers.0.self_attn.q_proj": 12}}
    message = refused(write_adapter(tmp_path, queries(2, 2), **fields))
    assert "model.layers.1.self_attn.q_proj has the scale 2" in message
    assert "power of two" in message


@pytest.mark.parametrize(
    ("method", "reference", "ratio"),
    [
        (LoRA(8, 16.0), LoRA(4, 8.0), 1.0),
        (LoRA(8, 64.0), LoRA(4, 8.0), 4.0),
        (LoRA(8, 2.0), LoRA(4, 8.0), 0.125),
        (LoRA(8, 24.0), LoRA(4, 8.0), None),
        (LoRA(6, 4.0), LoRA(3, 4.0), 0.5),
        (LoRA(2, 4.0, True), LoRA(8, 4.0, True), 2.0),
        (LoRA(2, 4.0, True), LoRA(4, 4.0, True), None),
    ],
)
def test_a_ratio_of_scales_is_exact_or_nothing(method, reference, ratio):
    assert scale_ratio(method, reference) == ratio


@pytest.mark.parametrize("version", ["0.18.1", None])
def test_experts_laid_out_by_the_order_of_dimensions_are_refused(tmp_path, version):
    folder = folder_of(tmp_path, "written/experts_fused")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"peft_version": version}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert "with PEFT 0.19 or later" in refused(folder, MOE)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_values_are_kept_as_f32_masters(tmp_path, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(x.shape).astype(dtype) for name, x in queries(2, 2).items()
    }
    params = load_adapter(write_adapter(tmp_path, tensors), DENSE).params
    for side in "ab":
        stack = params["layers"][0]["self_attn"]["q_proj"][side]
        assert stack.dtype == np.float32
        theirs = [tensors[Q.format(layer, side.upper())] for layer in range(2)]
        np.testing.assert_array_equal(stack, np.stack(theirs).astype(np.float32))


def test_a_base_of_another_hash_is_refused(tmp_path):
    folder = folder_of(tmp_path, "exports/dense_overrides")
    own = json.loads((folder / "orbit.json").read_text())["base_hash"]
    load_adapter(folder, DENSE, own)
    with pytest.raises(ValueError, match=rf"base 'qwen3_tied' with base_hash={own}, .* has 123: "):
        load_adapter(folder, DENSE, "123")
    (folder / "orbit.json").unlink()
    load_adapter(folder, DENSE, "123")


def test_a_shared_input_side_stays_one_when_written_again(tmp_path):
    folder = GOLDENS / "peft" / "written" / "experts_fused"
    adapter = load_adapter(folder, MOE)
    save_adapter(tmp_path, adapter, MOE, FACTS, layout="fused")
    ours, theirs = tensors_of(tmp_path), tensors_of(folder)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    again = load_adapter(tmp_path, MOE)
    jax.tree.map(np.testing.assert_array_equal, again.params, adapter.params)
    assert again.method_at("mlp", "experts", "up_proj") == LoRA(2, 4.0)


@pytest.mark.parametrize(
    ("method", "overrides", "settings", "message"),
    [
        (LoRA(1, 2.0), (("experts.up_proj", LoRA(1, 3.0)),), {}, "scales [2.0, 3.0]"),
        (LoRA(1, 2.0), (("o_proj", LoRA(1, 2.0, True)),), {}, "one use_rslora for all"),
        (LoRA(3, 2.0), (), {}, "only LoRA of the parameters' rank"),
        (LoRA(1, 2.0), (), {"layout": "packed"}, "layout='packed': must be one of"),
        (LoRA(1, 2.0), (), {"dtype": "float16"}, "dtype='float16': must be one of"),
    ],
)
def test_an_adapter_that_peft_cannot_say_is_refused(tmp_path, method, overrides, settings, message):
    adapter = Adapter(exports.adapter_of("moe_per_module").params, method, overrides)
    with pytest.raises(ValueError, match=re.escape(message)):
        save_adapter(tmp_path / "new", adapter, MOE, FACTS, **settings)
    assert not (tmp_path / "new").exists()


def test_only_adapted_modules_are_targets(tmp_path):
    """A name that other modules end in too is spelt until it is theirs alone."""
    config = read_config(GOLDENS / "qwen3_moe_first_dense")
    shapes = exports.shapes_of(config)

    def targets(*names: str) -> list[str]:
        adapter = exports.drawn(shapes, LoRA(1, 2.0), names)
        save_adapter(tmp_path, adapter, config, FACTS)
        return json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]

    assert targets("q_proj", "up_proj") == ["q_proj", "up_proj"]
    assert targets("mlp.up_proj") == ["mlp.up_proj"]
    assert targets("experts.up_proj") == [f"mlp.experts.{e}.up_proj" for e in range(4)]


def test_facts_list_and_hash_what_is_quantised_and_adapted():
    path = GOLDENS / "int4_symmetric"
    config = read_config(path)

    def facts(*targets: str) -> dict:
        adapter = exports.drawn(exports.shapes_of(config), LoRA(1, 2.0), targets)
        return adapter_facts(config, path, adapter, base="b", base_hash="h", step=7)

    both, fewer = facts("o_proj", "experts.up_proj"), facts("o_proj")
    assert both["adapted_weights"] == [
        "model.layers.[0-0].mlp.experts.[0-3].up_proj",
        "model.layers.[0-0].self_attn.o_proj",
    ]
    assert both["scales"] == dict.fromkeys(both["adapted_weights"], 2.0)
    assert (both["base"], both["base_hash"], both["step"]) == ("b", "h", 7)
    projections = [f"mlp.experts.[0-3].{name}_proj" for name in ("down", "gate", "up")]
    projections += [f"self_attn.{name}_proj" for name in "koqv"]
    assert both["quantised_weights"] == [f"model.layers.[0-0].{name}" for name in projections]
    assert fewer["adapted_weights_sha256"] != both["adapted_weights_sha256"]
    assert fewer["quantised_weights_sha256"] == both["quantised_weights_sha256"]
    listed = "\n".join(both["adapted_weights"]).encode()
    assert both["adapted_weights_sha256"] == hashlib.sha256(listed).hexdigest()


@pytest.mark.parametrize("name", ["k_quants.gguf", "simple.gguf"])
def test_facts_know_what_a_gguf_file_quantises(name):
    path = GOLDENS / "gguf" / name
    quantised = quantised_weights(read_config(path), path)
    assert any(weight.endswith("self_attn.q_proj") for weight in quantised)
    assert not any(weight.endswith("norm") for weight in quantised)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"rank_pattern": ["a"]}, "rank_pattern=.* must be an object"),
        ({"use_rslora": "false"}, "use_rslora='false': must be true or false"),
        ({"layers_to_transform": 0}, "layers_to_transform=0 may change the update"),
    ],
)
def test_fields_of_a_wrong_type_are_refused_by_name(field: dict, message: str, tmp_path: Path):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | field))
    with pytest.raises(ValueError, match=message):
        read_peft_config(tmp_path)
