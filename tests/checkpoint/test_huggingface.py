"""Hugging Face folders: bits against compressed-tensors, round trips, and what is refused."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.checkpoint.huggingface import base_hash, load_base, read_config
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    checkpoint_files,
    open_checkpoint,
    read_json,
    write_safetensors,
)
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor, dequantize, from_float

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
QUANTISED = sorted(path.parent.name for path in GOLDENS.glob("*/weights.npz"))
widen = jax.jit(dequantize, static_argnums=1)


def modules_of(folder: Path) -> dict[str, QTensor | jax.Array]:
    """Every module of a checkpoint by its Hugging Face name, cut out of the stacks of the base."""
    config, base = load_base(folder)
    leaves = jax.tree.leaves(layout(config))
    weights = jax.tree.leaves(base, is_leaf=lambda node: isinstance(node, QTensor))
    modules = {}
    for leaf, weight in zip(leaves, weights, strict=True):
        for module, index in zip(leaf.modules, np.ndindex(leaf.lead), strict=True):
            modules[module] = jax.tree.map(lambda x, index=index: np.asarray(x)[index], weight)
    return modules


def assert_equal_trees(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_modules_decode_to_the_bits_of_compressed_tensors(name: str):
    reference = np.load(GOLDENS / name / "weights.npz")
    modules = modules_of(GOLDENS / name)
    low_bit = {m for m, w in modules.items() if isinstance(w, QTensor) and w.scales is not None}
    assert low_bit == set(reference.files)
    for module in reference.files:
        weight = modules[module]
        ours = np.asarray(widen(weight, jnp.dtype(weight.scale_dtype)))
        np.testing.assert_array_equal(ours.view(np.uint16), reference[module], module)


def test_the_quantised_goldens_cover_every_way_of_packing():
    found = set()
    for name in QUANTISED:
        for weight in modules_of(GOLDENS / name).values():
            if isinstance(weight, QTensor) and weight.scales is not None:
                out, width = weight.shape
                whole_words = width % 8 == 0 and out % 8 == 0
                found.add((weight.format, weight.offset is not None, whole_words))
    expected = {("int4", False, True), ("int4", True, True), ("int4", True, False)}
    expected |= {("int4", False, False), ("int8", True, True), ("int8", False, False)}
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_plain_modules_keep_their_bits(name: str):
    refs = open_checkpoint(GOLDENS / name)
    modules = modules_of(GOLDENS / name)
    plain = {m: w for m, w in modules.items() if f"{m}.weight" in refs}
    assert plain
    for module, weight in plain.items():
        stored = refs[f"{module}.weight"].map()
        if isinstance(weight, QTensor):
            weight = widen(weight, jnp.dtype(weight.format))
        assert weight.dtype == stored.dtype
        np.testing.assert_array_equal(weight, stored, module)


@pytest.mark.parametrize("name", NAMES)
def test_a_base_takes_no_more_than_its_checkpoint(name: str):
    _, base = load_base(GOLDENS / name)
    stored = sum(ref.nbytes for ref in open_checkpoint(GOLDENS / name).values())
    assert base_bytes(base) <= 1.02 * stored


@pytest.mark.parametrize("name", NAMES)
def test_a_base_that_is_saved_loads_the_same(name: str, tmp_path: Path):
    config, base = load_base(GOLDENS / name)
    save_base(tmp_path, read_json(GOLDENS / name / "config.json"), base)
    again, loaded = load_base(tmp_path)
    assert again == config
    assert_equal_trees(loaded, base)


def test_a_saved_checkpoint_has_the_tensors_of_the_original(tmp_path: Path):
    for name in QUANTISED:
        _, base = load_base(GOLDENS / name)
        save_base(tmp_path, read_json(GOLDENS / name / "config.json"), base)
        original, saved = open_checkpoint(GOLDENS / name), open_checkpoint(tmp_path)
        assert original.keys() == saved.keys()
        for tensor, ref in original.items():
            assert ref.dtype == saved[tensor].dtype
            np.testing.assert_array_equal(ref.map(), saved[tensor].map(), tensor)


def test_one_scheme_is_saved_as_deployed_checkpoints_spell_it(tmp_path: Path):
    _, base = load_base(GOLDENS / "int4_symmetric")
    extra = GOLDENS / "int4_symmetric" / "reference.npz"
    save_base(tmp_path, read_json(extra.parent / "config.json"), base, [extra])
    quantization = read_json(tmp_path / "config.json")["quantization_config"]
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert quantization["ignore"] == ["model.layers.0.mlp.gate", "lm_head"]
    assert (tmp_path / extra.name).read_bytes() == extra.read_bytes()


def test_saving_refuses_a_base_of_another_config(tmp_path: Path):
    _, base = load_base(GOLDENS / "qwen3_moe")
    hf = read_json(GOLDENS / "qwen3_moe" / "config.json")
    with pytest.raises(ValueError, match="structure"):
        save_base(tmp_path, hf | {"tie_word_embeddings": True}, base)
    with pytest.raises(ValueError, match=r"experts.0.down_proj and its stack have shape"):
        save_base(tmp_path, hf | {"moe_intermediate_size": 16}, base)


def test_every_array_is_placed_by_its_path_in_the_base_and_its_shape():
    placed = {}

    def sharding(path: str, shape: tuple[int, ...]) -> SingleDeviceSharding:
        placed[path] = shape
        return SingleDeviceSharding(jax.devices()[0])

    _, base = load_base(GOLDENS / "int4_asymmetric", Placement(sharding))
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(base)
    }
    assert list(placed.items()) == list(found.items())
    assert "layers.0.self_attn.q_proj.offset" in placed


@pytest.mark.parametrize("name", ["int4_asymmetric", "families/gpt_oss"])
def test_progress_is_told_after_each_weight_and_reaches_the_total(name: str):
    told = []
    load_base(GOLDENS / name, Placement(progress=lambda done, total: told.append((done, total))))
    stored = sum(ref.nbytes for ref in open_checkpoint(GOLDENS / name).values())
    assert {total for _, total in told} == {stored}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == stored


def test_loading_holds_the_base_and_little_besides(tmp_path: Path):
    hf = read_json(GOLDENS / "int4_symmetric" / "config.json")
    hf |= {"vocab_size": 2048, "hidden_size": 512, "moe_intermediate_size": 256}

    def zeros(leaf: Leaf) -> QTensor | np.ndarray:
        plain = np.zeros((*leaf.lead, *leaf.shape), ml_dtypes.bfloat16)
        return plain if leaf.kind == "Vector" else from_float(plain)

    save_base(tmp_path, hf, jax.tree.map(zeros, layout(ModelConfig.from_hf(hf))))
    load_base(tmp_path)  # what JAX allocates once is not what is measured
    tracemalloc.start()
    _, base = load_base(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert base_bytes(base) > 7e6
    assert peak < base_bytes(base) + 0.5e6


def test_the_hash_follows_every_byte_of_weights_and_config(tmp_path: Path):
    folder = shutil.copytree(GOLDENS / "llama_sharded", tmp_path / "a")
    first = base_hash(folder)
    assert first == base_hash(GOLDENS / "llama_sharded")
    hashes = {first}
    for path in [*checkpoint_files(folder), folder / "config.json"]:
        path.write_bytes(path.read_bytes() + b"\n")
        hashes.add(base_hash(folder))
    assert len(hashes) == 4
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        base_hash(folder)


# Bad input: a golden is copied, one thing is changed, and the sentence must name it.

Tensors = dict[str, np.ndarray]


def changed(
    name: str,
    to: Path,
    tensors: Callable[[Tensors], object] = lambda _: None,
    config: Callable[[dict], object] = lambda _: None,
) -> Path:
    """A copy of a golden after `tensors` and `config` have changed it in place."""
    hf = read_json(GOLDENS / name / "config.json")
    config(hf)
    arrays = {n: np.array(ref.map()) for n, ref in open_checkpoint(GOLDENS / name).items()}
    tensors(arrays)
    (to / "config.json").write_text(json.dumps(hf))
    write_safetensors(to / SINGLE_FILE, arrays)
    return to


EXPERT = "model.layers.0.mlp.experts.1.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: model.norm.weight"),
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), rf"missing: {EXPERT}.weight_scale"),
        (lambda t: t.update(odd=np.zeros(1)), r"unknown: odd"),
        (lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}), r"shape \[3\], not"),
        (lambda t: t.update({"model.norm.weight": np.zeros(32)}), "float64, not bfloat16 or"),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((64, 32), ml_dtypes.float8_e4m3fn)}),
            "lm_head.weight has type float8_e4m3fn, not bfloat16 or float16 or float32",
        ),
        (lambda t: t[f"{EXPERT}.weight_shape"].fill(1), rf"{EXPERT}.weight_shape says \[1, 1\]"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(change: Callable, message: str, tmp_path: Path):
    folder = changed("int4_symmetric", tmp_path, tensors=change)
    with pytest.raises(ValueError, match=message) as error:
        load_base(folder)
    assert "use the config.json that belongs to these weights" in str(error.value)


def test_a_long_list_of_tensors_is_cut_short(tmp_path: Path):
    folder = changed("qwen3_moe", tmp_path, config=lambda hf: hf.update(num_local_experts=4))
    with pytest.raises(ValueError, match=r"unknown: .* and 18 more"):
        load_base(folder)


def weights(hf: dict) -> dict:
    return hf["quantization_config"]["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hf: hf["quantization_config"].update(quant_method="hqq"), "quant_method='hqq'"),
        (lambda hf: hf["quantization_config"].update(format="marlin-24"), "format='marlin-24'"),
        (
            lambda hf: hf["quantization_config"].update(
                transform_config={"config_groups": {"a": 1}}
            ),
            "config_groups={'a': 1} is not supported",
        ),
        (lambda hf: hf["quantization_config"]["config_groups"].update(W4A16=["Linear"]), "W4A16"),
        (
            lambda hf: hf["quantization_config"]["config_groups"]["group_0"].update(
                output_activations={"num_bits": 8}
            ),
            "output_activations",
        ),
        (lambda hf: weights(hf).update(strategy="tensor"), "strategy='tensor'"),
        (lambda hf: weights(hf).update(num_bits=3), "num_bits=3"),
        (lambda hf: weights(hf).update(type="float"), "type='float'"),
        (lambda hf: weights(hf).update(group_size=None), "group_size=None"),
        (lambda hf: weights(hf).update(group_size=24), "input width 32 is not a multiple of 24"),
        (lambda hf: weights(hf).update(actorder="group"), "actorder='group'"),
        (lambda hf: hf.update(model_type="mamba"), "model_type='mamba'"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(change: Callable, message: str, tmp_path: Path):
    folder = changed("int4_symmetric", tmp_path, config=change)
    with pytest.raises(ValueError, match=message):
        load_base(folder)


def test_a_width_without_pairs_of_codes_is_refused(tmp_path: Path):
    folder = changed("int4_asymmetric", tmp_path, config=lambda hf: hf.update(intermediate_size=35))
    with pytest.raises(ValueError, match="input width 35 is not a multiple of 2"):
        load_base(folder)


def test_stacks_begin_where_the_format_changes(tmp_path: Path):
    """A module left out by name, in the second layer of two."""

    def plain(tensors: Tensors) -> None:
        name = "model.layers.1.mlp.up_proj"
        for suffix in ("packed", "scale", "shape", "zero_point"):
            del tensors[f"{name}.weight_{suffix}"]
        tensors[f"{name}.weight"] = np.ones((36, 32), ml_dtypes.bfloat16)

    def ignore(hf: dict) -> None:
        hf["quantization_config"]["ignore"].append("model.layers.1.mlp.up_proj")

    folder = changed("int4_asymmetric", tmp_path, tensors=plain, config=ignore)
    config, base = load_base(folder)
    assert config.splits == (1,)
    assert config == read_config(folder)
    assert [stack["mlp"]["up_proj"].format for stack in base["layers"]] == ["int4", "bfloat16"]
    whole = load_base(GOLDENS / "int4_asymmetric")[1]["layers"][0]
    for i, stack in enumerate(base["layers"]):
        assert_equal_trees(
            stack["self_attn"], jax.tree.map(lambda x, i=i: x[i : i + 1], whole["self_attn"])
        )
    save_base(tmp_path / "again", read_json(folder / "config.json"), base)
    again, loaded = load_base(tmp_path / "again")
    assert again == config
    assert_equal_trees(loaded, base)


def test_a_float_type_that_changes_begins_a_stack_too(tmp_path: Path):
    def widen(tensors: Tensors) -> None:
        name = "model.layers.1.input_layernorm.weight"
        tensors[name] = tensors[name].astype(np.float32)

    config, base = load_base(changed("qwen3_moe", tmp_path, tensors=widen))
    assert config.splits == (1,)
    types = [stack["input_layernorm"].dtype for stack in base["layers"]]
    assert types == [jnp.bfloat16, jnp.float32]


def test_experts_of_one_layer_share_one_format(tmp_path: Path):
    def widen(tensors: Tensors) -> None:
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name].astype(np.float32)

    folder = changed("qwen3_moe", tmp_path, tensors=widen)
    message = (
        r"experts.3.up_proj \(plain of float32\) and .*experts.0.up_proj \(plain of bfloat16\)"
    )
    with pytest.raises(ValueError, match=message):
        load_base(folder)


def test_a_quantised_embedding_has_no_zero_points(tmp_path: Path):
    def target(hf: dict) -> None:
        group = hf["quantization_config"]["config_groups"]["group_0"]
        group["targets"].append("Embedding")

    folder = changed("int4_asymmetric", tmp_path, config=target)
    with pytest.raises(ValueError, match=r"embed_tokens is quantised with zero points"):
        load_base(folder)


def test_a_symmetric_quantised_embedding_survives_a_round_trip(tmp_path: Path):
    _, base = load_base(GOLDENS / "int4_symmetric")
    hf = read_json(GOLDENS / "int4_symmetric" / "config.json")
    codes = np.arange(64 * 16, dtype=np.uint32).astype(np.uint8).reshape(64, 16)
    scales = np.full((64, 1), 0x3F80, np.uint16)
    base["embed_tokens"] = QTensor(codes, scales, None, format="int4", group_size=32)
    save_base(tmp_path, hf, base)
    assert_equal_trees(load_base(tmp_path)[1], base)


def test_a_tied_head_may_be_stored_again_if_it_is_the_same(tmp_path: Path):
    def head(tensors: Tensors, add: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(add)
        tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    folder = changed("qwen3_tied", tmp_path, tensors=lambda t: head(t, 0))
    assert_equal_trees(load_base(folder)[1], load_base(GOLDENS / "qwen3_tied")[1])
    folder = changed("qwen3_tied", tmp_path, tensors=lambda t: head(t, 1))
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true but lm_head.weight differs"):
        load_base(folder)


def test_names_go_before_patterns_before_classes(tmp_path: Path):
    """Modules that several groups name take the most exact one, as compressed-tensors does."""
    _, base = load_base(GOLDENS / "int4_symmetric")
    hf = read_json(GOLDENS / "int4_symmetric" / "config.json")
    base["lm_head"] = from_float(np.ones((64, 32), ml_dtypes.bfloat16))
    save_base(tmp_path, hf, base)
    hf = read_json(tmp_path / "config.json")
    four = hf["quantization_config"]["config_groups"]["group_0"]
    eight = {**four, "weights": four["weights"] | {"num_bits": 8}}
    groups = {"a": eight, "b": {**four, "targets": [r"re:.*_proj$"]}}
    hf["quantization_config"]["config_groups"] = groups
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert_equal_trees(load_base(tmp_path)[1], base)


def test_bad_files_are_refused_before_the_config_is_used(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_base(tmp_path / "nowhere")
    folder = shutil.copytree(GOLDENS / "llama_sharded", tmp_path / "a")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds a list, not an object"):
        load_base(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        load_base(folder)
    next(folder.glob("*2-of-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=rf"2-of-00002.safetensors is missing and {INDEX_FILE}"):
        load_base(folder)
