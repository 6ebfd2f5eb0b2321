"""A plain checkpoint written in low bits: what other packages read in it, and what is refused."""

import dataclasses
import functools
import hashlib
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from orbit_jax.checkpoint.huggingface import load_base, open_base
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.leaf_tensors import pieces, tensor_name
from orbit_jax.checkpoint.quantized_plan import low_bit_group, make_plan
from orbit_jax.checkpoint.safetensors_io import open_checkpoint, write_safetensors
from orbit_jax.checkpoint.scheme import PLAIN
from orbit_jax.checkpoint.write_quantized import by_group, save_quantized, total
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.qtensor import dequantize

GOLDENS = Path(__file__).parents[1] / "goldens"
MIXTRAL = GOLDENS / "families" / "mixtral"
KIMI = GOLDENS / "families" / "kimi_k25"
sys.path.insert(0, str(GOLDENS))

import write_quantized_folders as cases  # noqa: E402

every_case = pytest.mark.parametrize("name", cases.CASES)
widen = jax.jit(dequantize, static_argnums=1)


def low_bit_weights(folder: Path) -> dict[str, np.ndarray]:
    """Each low-bit weight as it is loaded, f32, by the name of the plain tensor."""
    contents, found = open_base(folder), {}
    for leaf in jax.tree.leaves(contents.layout):
        if (scheme := contents.scheme[leaf]) == PLAIN:
            continue
        for place, (_, piece, _) in enumerate(pieces(leaf, scheme, contents.refs)):
            each = leaf.lead[1] if leaf.fused else 1
            name = tensor_name(leaf, leaf.modules[place // each], "weight")
            wide = np.asarray(widen(piece, jnp.float32))
            if not leaf.fused:
                found[name] = wide
                continue
            experts, rows = leaf.lead[1], leaf.rows or (0, 1)
            shape = (experts, leaf.shape[1], leaf.shape[0] * rows[1])
            whole = found.setdefault(name, np.zeros(shape, np.float32))
            whole[place % experts].T[rows[0] :: rows[1]] = wide
    return found


@every_case
def test_the_folder_is_the_one_that_other_packages_have_read(name, tmp_path):
    cases.write(name, tmp_path / "out")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (cases.FOLDER / name / file).read_bytes()


@every_case
def test_weights_are_bit_for_bit_those_of_compressed_tensors(name):
    digests = json.loads((cases.FOLDER / name / "weights.json").read_text())
    ours = low_bit_weights(cases.FOLDER / name)
    assert {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in ours.items()} == digests


@every_case
def test_logprobs_are_those_of_transformers_on_these_weights(name):
    reference = np.load(cases.FOLDER / name / "reference.npz")
    tokens, expected = reference["tokens"], reference["logprobs"]
    config, base = load_base(cases.FOLDER / name)
    config = dataclasses.replace(config, compute_dtype="float32")
    rows, positions = np.indices(tokens.shape, np.int32)
    flat = (jnp.asarray(x.reshape(-1)) for x in (tokens, rows, positions))
    stream = Stream(*flat, *tokens.shape)

    @functools.partial(jax.jit, compiler_options=toy.QUICK)
    def run(base: dict, stream: Stream) -> jax.Array:
        return jax.nn.log_softmax(logits(config, base, apply(config, base, None, stream)[0]))

    ours = run(base, stream).reshape(expected.shape)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_errors_are_those_of_the_weights_that_are_loaded(tmp_path):
    plan = make_plan(MIXTRAL, "nvfp4")
    errors = save_quantized(tmp_path / "out", plan)
    plain, low = open_checkpoint(MIXTRAL), low_bit_weights(tmp_path / "out")
    assert errors.keys() == low.keys()
    for name, error in errors.items():
        w = np.asarray(plain[name].map(), np.float32)
        assert error.relative == pytest.approx(
            np.linalg.norm(low[name] - w) / np.linalg.norm(w), rel=1e-4
        )
        assert error.largest == pytest.approx(np.abs(low[name] - w).max())
        assert 0.05 < error.relative < 0.15
        assert error.bytes_before == 2 * w.size
        assert error.bytes_after == w.size / 2 + w.size / 16 + 4
    groups = by_group(plan, errors)
    assert set(groups) == {low_bit_group(weight.module) for weight in plan.weights.values()}
    whole = total(list(groups.values()))
    assert (whole.weights, whole.norm) == (
        len(errors),
        pytest.approx(total(list(errors.values())).norm),
    )


def test_weights_that_are_run_as_one_share_the_overall_scale(tmp_path):
    save_quantized(tmp_path / "out", make_plan(MIXTRAL, "nvfp4"))
    refs = open_checkpoint(tmp_path / "out")
    scale = lambda name: float(refs[f"model.layers.0.{name}.weight_global_scale"].map()[0])  # noqa: E731
    q, k, v = (scale(f"self_attn.{name}_proj") for name in "qkv")
    w1, w2, w3 = (scale(f"block_sparse_moe.experts.0.w{i}") for i in (1, 2, 3))
    assert q == k == v != scale("self_attn.o_proj")
    assert w1 == w3 != w2


def test_files_are_no_larger_than_asked_and_an_index_lists_them(tmp_path):
    plan, told = make_plan(MIXTRAL, "int4"), []
    save_quantized(tmp_path / "one", plan, tell=lambda *x: told.append(x))
    save_quantized(tmp_path / "many", plan, max_file_bytes=9000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    one, many = (open_checkpoint(tmp_path / name) for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all((one[name].map() == many[name].map()).all() for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(ref.nbytes for ref in one.values())
    whole = sum(ref.nbytes for ref in open_checkpoint(MIXTRAL).values())
    assert told[-1] == (whole, whole)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_router_norms_embedding_and_head_keep_their_bytes(tmp_path):
    save_quantized(tmp_path / "out", make_plan(MIXTRAL, "fp8"))
    before, after = open_checkpoint(MIXTRAL), open_checkpoint(tmp_path / "out")
    for leaf in jax.tree.leaves(layout(open_base(MIXTRAL).config)):
        if leaf.kind == "Linear" and leaf.lead:
            continue
        for module in leaf.modules:
            name = tensor_name(leaf, module, "weight")
            assert after[name].dtype == before[name].dtype
            assert (after[name].map() == before[name].map()).all()


def test_experts_alone_as_kimi_has_them(tmp_path):
    """Within a larger model, whose other parts are copied and named as not quantised."""
    plan = make_plan(KIMI, "fp8", only="experts")
    save_quantized(tmp_path / "out", plan)
    assert all(".mlp.experts." in name for name in plan.weights)
    before, after = open_checkpoint(KIMI), open_checkpoint(tmp_path / "out")
    assert before.keys() <= after.keys()
    assert {n for n in after if n not in before} == {f"{n}_scale" for n in plan.weights}
    patterns = plan.config["quantization_config"]["ignore"]
    assert r"re:.*mm_projector\.proj\.\d+$" in patterns
    assert r"re:.*layers\.\d+\.self_attn\.kv_b_proj$" in patterns
    assert not any("experts" in p and "shared_experts" not in p for p in patterns)
    contents = open_base(tmp_path / "out")
    for leaf in jax.tree.leaves(contents.layout):
        is_expert = ".experts." in leaf.modules[0]
        assert (contents.scheme[leaf] != PLAIN) == (is_expert and leaf.kind == "Linear")


def test_what_is_ignored_stays_plain_in_its_layer_alone(tmp_path):
    plan = make_plan(MIXTRAL, "int4", ignore=[r"re:.*layers\.0\.self_attn\.(q|k|v)_proj$"])
    save_quantized(tmp_path / "out", plan)
    assert {w.module for w in plan.weights.values() if "_proj" in w.module} == {
        f"model.layers.{i}.self_attn.{name}_proj"
        for i, names in enumerate(("o", "qkvo"))
        for name in names
    }
    assert open_base(tmp_path / "out").config.splits == (1,)


@pytest.mark.parametrize(
    ("folder", "form", "choices", "message"),
    [
        (
            "int4_symmetric",
            "fp8",
            {},
            r"is quantised already \(quant_method='compressed-tensors'\)",
        ),
        (
            "qwen3_moe",
            "int4",
            {},
            r"experts.0.down_proj: the input width 8 is not a multiple of 32",
        ),
        ("families/mixtral", "int4", {"group": 24}, "width 32 is not a multiple of 24"),
        ("families/mixtral", "int4", {"group": 0}, "--group=0: give a positive number"),
        ("families/mixtral", "nvfp4", {"group": 32}, "nvfp4 has groups of 16: leave --group out"),
        ("families/mixtral", "fp8", {"group": 32}, "fp8 has one scale a row: leave --group out"),
        ("families/mixtral", "int3", {}, "--format=int3: use one of int4, fp8, mxfp4, nvfp4"),
        ("families/gpt_oss", "int4", {}, "all experts of a layer in one tensor.*--format mxfp4"),
        ("qwen3_tied", "int4", {"only": "experts"}, "--only=experts: .* has none of these layers"),
        (
            "qwen3_tied",
            "fp8",
            {"ignore": ["re:.*experts.*"]},
            r"--ignore=re:.*experts.*: no weight",
        ),
        ("qwen3_tied", "fp8", {"ignore": ["re:("]}, r"the target 're:\(' is no pattern"),
        ("qwen3_tied", "fp8", {"ignore": ["re:.*"]}, "--ignore leaves nothing to quantise"),
        (
            "qwen3_tied",
            "fp8",
            {"ignore": ["re:.*q_proj"]},
            r"--ignore leaves a part of re:.*layers.*\(q_proj\|k_proj\|v_proj\).* as it is",
        ),
        ("gguf/simple.gguf", "fp8", {}, "is a GGUF file: start from the model's Hugging Face"),
    ],
)
def test_bad_choices_are_one_sentence(folder, form, choices, message):
    with pytest.raises(ValueError, match=message):
        make_plan(GOLDENS / folder, form, **choices)


def test_a_layer_that_does_not_fit_may_be_ignored():
    plan = make_plan(GOLDENS / "qwen3_moe", "int4", ignore=["re:.*experts.*"])
    assert all("self_attn" in name for name in plan.weights)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="already exists: name a new folder"):
        save_quantized(tmp_path, make_plan(MIXTRAL, "fp8"))


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    shutil.copytree(MIXTRAL, tmp_path / "in")
    tensors = {k: np.array(ref.map()) for k, ref in open_checkpoint(MIXTRAL).items()}
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][3, 5] = np.nan
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} holds values that are no finite numbers"):
        save_quantized(tmp_path / "out", make_plan(tmp_path / "in", "mxfp4"))
    assert not (tmp_path / "out" / "config.json").exists()
