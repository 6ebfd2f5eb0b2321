"""Small checkpoints as deployed ones are laid out, of random bits: one for each way of quantising.

A case is a model, what its configuration says about quantisation, and the scheme of each leaf. The
values of its weights follow from the stored tensors by `formats.decode`.
"""

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orbit_jax.checkpoint.formats import decode, stored_tensors
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.leaf_tensors import expected_tensors, tensor_name
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE, write_safetensors
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.model.config import ModelConfig

FAMILIES = Path(__file__).parents[1] / "goldens/families"
F32, BF16 = "float32", "bfloat16"


@dataclass(frozen=True)
class Case:
    """`extra` tensors belong to no weight; `prefix` stands before all names in the files."""

    hf: dict
    scheme: Callable[[Leaf], Scheme]
    files: dict[str, dict] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    prefix: str = ""
    scale_type: str = ""


def family(name: str, **changes: Any) -> dict:
    """The configuration of a golden, changed."""
    return json.loads((FAMILIES / name / "config.json").read_text()) | changes


def small(model_type: str, **changes: Any) -> dict:
    """A model of two layers with equal widths of 64."""
    return {
        "model_type": model_type,
        "vocab_size": 48,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | changes


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def linear(scheme: Scheme) -> Callable[[Leaf], Scheme]:
    """A scheme for all linear layers but the head."""
    is_plain = lambda leaf: leaf.kind != "Linear" or leaf.modules == ("lm_head",)  # noqa: E731
    return lambda leaf: PLAIN if is_plain(leaf) else scheme


def experts(scheme: Scheme) -> Callable[[Leaf], Scheme]:
    """A scheme for the weights of experts alone."""
    is_expert = lambda leaf: ".experts" in leaf.modules[0] and leaf.kind == "Linear"  # noqa: E731
    return lambda leaf: scheme if is_expert(leaf) else PLAIN


def compressed(form: str, weights: dict, *ignore: str, **group: Any) -> dict:
    """A `quantization_config` of compressed-tensors."""
    own = {"targets": ["Linear"], "weights": weights, **group}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": own},
            "ignore": ["lm_head", *ignore],
        }
    }


def quantised(method: str, **config: Any) -> dict:
    return {"quantization_config": {"quant_method": method, **config}}


def kimi() -> Case:
    """Experts in 4 bits below `language_model.`, eyes beside it."""
    hf = family("kimi_k25")
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    ignore = [f"re:.*{name}.*" for name in ("self_attn", "shared_experts", r"mlp\.(gate|up|down)_")]
    own = compressed("pack-quantized", int4, *ignore)
    hf["text_config"] |= {"moe_intermediate_size": 32, "num_nextn_predict_layers": 0} | own
    eyes = {f"{name}.weight": np.ones(3, np.float32) for name in ("vision_tower.a", "mm_projector")}
    scheme = experts(Scheme("pack-quantized", bits=4, group=32))
    return Case(hf, scheme, extra=eyes, prefix="language_model.")


def deepseek() -> Case:
    """Blocks of FP8 that are cut short, one layer of guesses."""
    config = quantised("fp8", fmt="e4m3", weight_block_size=[16, 16], activation_scheme="dynamic")
    hf = family("deepseek_v3", num_nextn_predict_layers=1, **config)
    scheme = linear(Scheme("fp8", rows=16, group=16, scale="weight_scale_inv"))
    guess = {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}
    return Case(hf, scheme, extra=guess, scale_type=F32)


ACTIVATIONS = {
    "model.layers.0.self_attn.q_proj.input_scale": np.float32([1]),
    "model.layers.1.self_attn.k_proj.k_scale": np.float32([1]),
    "model.layers.1.self_attn.v_proj.v_scale": np.float32([1]),
}
GPTQ = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}

CASES: dict[str, Callable[[], Case]] = {
    "kimi": kimi,
    "deepseek": deepseek,
    "gpt_oss": lambda: Case(
        family("gpt_oss", **quantised("mxfp4", modules_to_not_convert=["lm_head"])),
        experts(Scheme("mxfp4-blocks")),
    ),
    "gpt_oss_plain": lambda: Case(family("gpt_oss"), lambda leaf: PLAIN),
    "modelopt_nvfp4": lambda: Case(
        small("qwen3_moe", **EXPERTS),
        linear(Scheme("nvfp4", scale="weight_scale_2")),
        files={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            }
        },
        extra=ACTIVATIONS,
    ),
    "modelopt_fp8": lambda: Case(
        small("llama", **quantised("modelopt", quant_algo="FP8")),
        linear(Scheme("fp8", rows=0)),
        extra=ACTIVATIONS,
        scale_type=F32,
    ),
    "ct_nvfp4": lambda: Case(
        small("llama")
        | compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            input_activations={"num_bits": 4, "dynamic": "local"},
        ),
        linear(Scheme("nvfp4", scale="weight_global_scale")),
    ),
    "ct_mxfp4": lambda: Case(
        small("llama")
        | compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        linear(Scheme("mxfp4", scale="weight_scale")),
    ),
    "ct_fp8_channel": lambda: Case(
        small("qwen3")
        | compressed(
            "float-quantized",
            FLOAT8 | {"strategy": "channel"},
            input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"},
        ),
        linear(Scheme("fp8")),
        scale_type=BF16,
    ),
    "ct_fp8_block": lambda: Case(
        small("llama", intermediate_size=72)
        | compressed(
            "float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [32, 16]}
        ),
        linear(Scheme("fp8", rows=32, group=16)),
    ),
    "ct_int8": lambda: Case(
        small("llama")
        | compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        linear(Scheme("int-quantized", bits=8)),
    ),
    "gptq": lambda: Case(
        small("qwen3_moe", **EXPERTS, **quantised("gptq", **GPTQ, sym=False, desc_act=False)),
        linear(Scheme("gptq", bits=4, group=32, symmetric=False, minus_one=True)),
    ),
    "gptq_act_order": lambda: Case(
        small("llama", **quantised("gptq", **GPTQ, sym=False, desc_act=True)),
        linear(Scheme("gptq", bits=4, group=32, symmetric=False, minus_one=True, ordered=False)),
    ),
    "awq": lambda: Case(
        small("llama", **quantised("awq", bits=4, group_size=32, version="gemm", zero_point=True)),
        linear(Scheme("awq", bits=4, group=32, symmetric=False)),
    ),
}


def draw(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, or scales and floats of ordinary size; the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("g_idx"):
        return rng.permutation(np.arange(shape[0]) // 32).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        if "scale" in name:
            return rng.integers(100, 140, shape).astype(dtype)
        raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(shape)
    return rng.uniform(0.01, 1, shape).astype(dtype)


def write(case: Case, folder: Path, shards: int = 1) -> dict[str, np.ndarray]:
    """Writes a case as a folder; gives its tensors by their names without a prefix."""
    tensors = dict(case.extra)
    for leaf in jax.tree.leaves(layout(ModelConfig.from_hf(case.hf))):
        scheme = case.scheme(leaf)
        for module in leaf.modules:
            for name, stored in expected_tensors(leaf, module, scheme).items():
                types = {dtype.name: dtype for dtype in stored.dtypes}
                wanted = case.scale_type if "scale" in name else BF16
                dtype = types.get(wanted, stored.dtypes[0])
                if name.endswith("weight_shape"):
                    tensors[name] = np.array(leaf.shape)
                elif not (name.endswith("g_idx") and scheme.ordered):
                    tensors[name] = draw(name, dtype, stored.shapes[0])
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ({"config.json": case.hf} | case.files).items():
        (folder / file).write_text(json.dumps(content))
    named = {
        name if name in case.extra else case.prefix + name: tensor
        for name, tensor in tensors.items()
    }
    if shards == 1:
        write_safetensors(folder / SINGLE_FILE, named)
        return tensors
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(named)}
    for file in set(files.values()):
        part = {name: named[name] for name in named if files[name] == file}
        write_safetensors(folder / file, part)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors


def values(
    leaf: Leaf, index: tuple[int, ...], scheme: Scheme, tensors: dict[str, np.ndarray]
) -> np.ndarray:
    """f32 values of the weight (or vector) at `index` of a leaf."""
    lead = leaf.lead[:1] if leaf.fused else leaf.lead
    module = leaf.modules[int(np.ravel_multi_index(index[: len(lead)], lead)) if lead else 0]
    start, step = leaf.rows or (0, 1)
    shape = (leaf.shape[0] * step, *leaf.shape[1:])
    if leaf.kind == "Vector":
        own = tensors[tensor_name(leaf, module, "weight")]
        return (own[index[1]][start::step] if leaf.fused else own).astype(np.float32)
    names = {suffix: tensor_name(leaf, module, suffix) for suffix in stored_tensors(scheme, shape)}
    own = {suffix: tensors[name] for suffix, name in names.items() if name in tensors}
    if leaf.fused:
        own = {suffix: tensor[index[1]] for suffix, tensor in own.items()}
        if scheme == PLAIN:
            own = {"weight": own["weight"].T}
    return decode(scheme, shape, own)[start::step]
