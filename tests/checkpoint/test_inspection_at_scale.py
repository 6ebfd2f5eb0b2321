"""A checkpoint of Kimi-K2's widths, told by its headers: in seconds, and right."""

import json
import math
import time
from pathlib import Path

import numpy as np

from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.inspection import inspect
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE, open_checkpoint

# Kimi-K2 as it is deployed, in fewer layers: routed experts in INT4 by groups of 32, the rest bf16.
KIMI = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
            }
        },
        "ignore": [
            *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
WIDTH, EXPERTS = 7168, 384
TOP = {"model.embed_tokens": (163840, WIDTH), "model.norm": (WIDTH,), "lm_head": (163840, WIDTH)}
ATTENTION = {
    "q_a_proj": (1536, WIDTH),
    "q_a_layernorm": (1536,),
    "q_b_proj": (64 * 192, 1536),
    "kv_a_proj_with_mqa": (576, WIDTH),
    "kv_a_layernorm": (512,),
    "kv_b_proj": (64 * 256, 512),
    "o_proj": (WIDTH, 64 * 128),
}


def gated(inner: int) -> dict[str, tuple[int, int]]:
    return {
        "gate_proj": (inner, WIDTH),
        "up_proj": (inner, WIDTH),
        "down_proj": (WIDTH, inner),
    }


def kimi_layer(layer: int) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Plain and quantised modules of a layer, with their shapes."""
    plain = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    plain |= {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    quantised = {}
    if layer == 0:
        plain |= {f"mlp.{name}": shape for name, shape in gated(18432).items()}
    else:
        plain |= {f"mlp.shared_experts.{name}": shape for name, shape in gated(2048).items()}
        plain |= {"mlp.gate": (EXPERTS, WIDTH)}
        for expert in range(EXPERTS):
            names = gated(2048).items()
            quantised |= {f"mlp.experts.{expert}.{name}": shape for name, shape in names}
    start = f"model.layers.{layer}."
    return {start + n: s for n, s in plain.items()}, {start + n: s for n, s in quantised.items()}


def write_sparse(path: Path, plain: dict[str, tuple], quantised: dict[str, tuple]) -> list[str]:
    """A shard of full size that takes no room: but for header and shapes, it is a hole."""
    shapes = {f"{name}.weight_shape": ("I64", (2,), 16) for name in quantised}  # come first
    rest = {}
    for name, (out, width) in quantised.items():
        rest[f"{name}.weight_packed"] = ("I32", (out, width // 8), out * width // 2)
        rest[f"{name}.weight_scale"] = ("BF16", (out, width // 32), out * width // 16)
    for name, shape in plain.items():
        rest[f"{name}.weight"] = ("BF16", shape, 2 * math.prod(shape))
        if name.endswith("mlp.gate"):
            rest[f"{name}.e_score_correction_bias"] = ("F32", (EXPERTS,), 4 * EXPERTS)
    header, end = {}, 0
    for name, (kind, shape, nbytes) in (shapes | rest).items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(np.array(list(quantised.values()), np.int64).tobytes())
        file.truncate(8 + len(text) + end)
    return list(header)


def test_a_model_of_kimi_k2s_widths_is_told_in_seconds_and_right(tmp_path: Path):
    layers, where = 8, {}
    total = active = 0
    for shard in range(layers + 1):
        plain, quantised = kimi_layer(shard) if shard < layers else (TOP, {})
        name = f"model-{shard + 1:05d}-of-{layers + 1:05d}.safetensors"
        where |= dict.fromkeys(write_sparse(tmp_path / name, plain, quantised), name)
        gates = EXPERTS if quantised else 0  # the router's correction
        dense = sum(map(math.prod, plain.values())) + gates
        experts = sum(map(math.prod, quantised.values()))
        total += dense + experts
        active += dense + experts * 8 // EXPERTS
    active -= math.prod(TOP["model.embed_tokens"])
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(KIMI | {"num_hidden_layers": layers}))
    start = time.process_time()
    found = inspect(tmp_path, LoRA(16, 32.0))
    seconds = time.process_time() - start
    assert found.refusals == ()
    assert (found.parameters, found.active_parameters) == (total, active)
    assert len(where) == len(open_checkpoint(tmp_path)) > 24_000
    # One search of all names for each module took minutes.
    assert seconds < 10
    experts = [group for group in found.weights if ".experts." in group.name]
    assert {group.bytes_per_weight for group in experts} == {0.5625}
    assert {(group.layers, group.format) for group in experts} == {
        ("1-7", "pack-quantized (4 bits, groups of 32)")
    }
    assert {group.count for group in experts} == {7 * EXPERTS}
    assert found.read_bytes - found.packed_bytes == 16 * 3 * 7 * EXPERTS  # shapes are not held
    assert found.files == layers + 1
    assert found.file_bytes > found.read_bytes > 70e9
