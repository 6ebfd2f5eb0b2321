"""Remakes the goldens of `deployed/`: families in the formats that they are deployed in.

Development only: `make goldens`. A folder is a tiny checkpoint whose weights are random codes, and
`reference.npz` (as `make_family_goldens.py` says) is what transformers computes in float32 from the
values that the codes stand for. Where transformers reads the format itself on a CPU, its own
reading of the folder must give the same log-probs.
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from make_family_goldens import (
    DEEPSEEK,
    GPT_OSS,
    GROUPED,
    LLAMA3,
    YARN,
    draw_vectors,
    save_reference,
)
from make_format_goldens import E4M3, all_codes, eight_bits, nibbles, pairs
from make_goldens import EXPERTS, SMALL, fresh, random_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Mxfp4Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent / "deployed"
GROUP = 16
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PROJECTIONS = r"_proj$|kv_a_proj_with_mqa$"

Stored = dict[str, torch.Tensor]
Packer = Callable[[tuple[int, int]], tuple[Stored, torch.Tensor]]  # stored tensors, values


def scales(dtype: torch.dtype, deviation: float, width: int, *shape: int) -> torch.Tensor:
    """Positive scales under which codes of that deviation make a weight of a usual size."""
    return ((torch.rand(shape) + 0.5) * 1.5 / deviation / width**0.5).to(dtype)


def int4_words(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    out, width = shape
    codes = all_codes(16, out, width) - 8
    scale = scales(torch.bfloat16, 4.6, width, out, width // GROUP)
    stored = {
        "weight_packed": pack_to_int32(codes.to(torch.int8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(shape),
    }
    return stored, codes * scale.float().repeat_interleave(GROUP, 1)


def fp8_blocks(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    """Blocks of 16x16, the last of them partial."""
    out, width = shape
    codes = eight_bits(E4M3, out, width)
    scale = scales(torch.float32, 150.0, width, -(-out // GROUP), -(-width // GROUP))
    spread = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:out, :width]
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def fp8_channels(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    out, width = shape
    codes, scale = eight_bits(E4M3, out, width), scales(torch.float32, 150.0, width, out, 1)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_tensor(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    codes, scale = eight_bits(E4M3, *shape), scales(torch.float32, 150.0, shape[1])
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return stored, codes.float() * scale


def four_bit_floats(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    packed = pairs(*shape)
    return packed, E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()]


def nvfp4(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors: the global scale divides."""
    packed, values = four_bit_floats(shape)
    overall = torch.tensor([900.0])
    block = (scales(torch.float32, 2.7, shape[1], shape[0], shape[1] // 16) * overall).to(E4M3)
    stored = {"weight_packed": packed, "weight_scale": block, "weight_global_scale": overall}
    return stored, values * (block.float() / overall).repeat_interleave(16, 1)


def nvfp4_modelopt(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    """ModelOpt: the global scale multiplies."""
    packed, values = four_bit_floats(shape)
    overall = torch.tensor(0.0013)
    block = (scales(torch.float32, 2.7, shape[1], shape[0], shape[1] // 16) / overall).to(E4M3)
    stored = {"weight": packed, "weight_scale": block, "weight_scale_2": overall}
    return stored, values * (block.float() * overall).repeat_interleave(16, 1)


def gptq(shape: tuple[int, int], act_order: bool = False) -> tuple[Stored, torch.Tensor]:
    out, width = shape
    codes, zeros = all_codes(16, width, out), all_codes(16, width // GROUP, out)
    groups = torch.arange(width) // GROUP
    groups = groups[torch.randperm(width)] if act_order else groups
    scale = scales(torch.float16, 6.5, width, width // GROUP, out)
    stored = {
        "qweight": nibbles(codes, 4),
        "qzeros": nibbles(((zeros - 1) % 16).T, 4).T,
        "scales": scale,
        "g_idx": groups.int(),
    }
    return stored, ((codes - zeros[groups]).float() * scale.float()[groups]).T


def awq(shape: tuple[int, int]) -> tuple[Stored, torch.Tensor]:
    out, width = shape
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes, zeros = all_codes(16, width, out), all_codes(16, width // GROUP, out)
    scale = scales(torch.float16, 6.5, width, width // GROUP, out)
    pack = lambda x: nibbles(x.unflatten(1, (-1, 8))[..., order].flatten(1).T, 4).T  # noqa: E731
    spread = [x.repeat_interleave(GROUP, 0) for x in (zeros, scale.float())]
    stored = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scale}
    return stored, ((codes - spread[0]).float() * spread[1]).T


def compressed(form: str, weights: dict, ignore: list[str], targets: str = "Linear") -> dict:
    group = {"targets": [targets], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ignore,
    }


ROUTER_AND_HEAD = ["lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$"]
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_BLOCKS = FP8 | {"weight_block_size": [GROUP, GROUP]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
NVFP4 |= {"group_size": 16}
CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}

WIDE = GROUPED | {"num_hidden_layers": 1}
MOE = SMALL | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "num_hidden_layers": 1}
KIMI = DEEPSEEK | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_hidden_layers": 2}
KIMI |= {"n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 12}
MIXTRAL = WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}

# Family, packer of the matching modules, quantization_config, whether transformers reads it here.
CASES: dict[str, tuple[PreTrainedConfig, Packer, str, dict, bool]] = {
    "deepseek_v3_fp8": (
        DeepseekV3Config(**DEEPSEEK | {"num_hidden_layers": 2}), fp8_blocks, PROJECTIONS,
        FP8_BLOCKS, False,  # transformers refuses partial blocks
    ),
    "deepseek_v3_awq": (DeepseekV3Config(**KIMI), awq, PROJECTIONS, AWQ, False),
    "kimi_k25_int4": (
        DeepseekV3Config(**KIMI, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        int4_words, r"experts\.\d+\.(gate|up|down)_proj$",
        compressed(
            "pack-quantized",
            INT4,
            [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        ),
        False,
    ),
    "qwen3_moe_fp8": (Qwen3MoeConfig(**MOE), fp8_blocks, PROJECTIONS, FP8_BLOCKS, True),
    "qwen3_moe_gptq": (Qwen3MoeConfig(**MOE), gptq, PROJECTIONS, GPTQ, False),
    "qwen3_moe_nvfp4": (
        Qwen3MoeConfig(**MOE), nvfp4_modelopt, PROJECTIONS,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, False,
    ),
    "qwen3_awq": (Qwen3Config(**SMALL | {"num_hidden_layers": 1}), awq, PROJECTIONS, AWQ, False),
    "llama_fp8_channels": (
        LlamaConfig(**WIDE, rope_parameters=LLAMA3), fp8_channels, PROJECTIONS,
        compressed("float-quantized", CHANNELS, ["lm_head"]), True,
    ),
    "llama_fp8_tensor": (
        LlamaConfig(**WIDE), fp8_tensor, PROJECTIONS,
        {"quant_method": "modelopt", "quant_algo": "FP8"}, False,
    ),
    "llama_gptq_act_order": (
        LlamaConfig(**WIDE), lambda shape: gptq(shape, act_order=True), PROJECTIONS,
        GPTQ | {"desc_act": True}, False,
    ),
    "llama_nvfp4": (
        LlamaConfig(**WIDE, tie_word_embeddings=True), nvfp4, PROJECTIONS,
        compressed("nvfp4-pack-quantized", NVFP4, ["lm_head"]), False,  # its reader gives bf16
    ),
    "llama_int4_first_layer_plain": (
        LlamaConfig(**GROUPED | {"num_hidden_layers": 3}), int4_words,
        r"layers\.[12]\.(self_attn|mlp)\.\w+_proj$",
        compressed("pack-quantized", INT4, ["lm_head", r"re:model\.layers\.0\..*"]), True,
    ),
    "mixtral_awq": (MixtralConfig(**MIXTRAL), awq, r"_proj$|\.w[123]$", AWQ, False),
    "mixtral_gptq": (MixtralConfig(**MIXTRAL), gptq, r"_proj$|\.w[123]$", GPTQ, False),
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        save_case(name, *case)
    save_gpt_oss("gpt_oss_mxfp4")


def save_case(
    name: str, config: PreTrainedConfig, pack: Packer, modules: str, quantization: dict, own: bool
) -> None:
    folder = fresh(FOLDER / name)
    with tempfile.TemporaryDirectory() as plain:
        model = random_model(config, torch.bfloat16)
        draw_vectors(model)
        model.save_pretrained(plain)
        tensors = load_file(Path(plain) / "model.safetensors")
        exact = {key: value.float() for key, value in tensors.items()}
        for key in sorted(tensors):
            module = key.removesuffix(".weight")
            if re.search(modules, module):
                stored, exact[key] = pack(tuple(tensors.pop(key).shape))
                exact[key] = exact[key].contiguous()
                tensors |= {f"{module}.{k}": v.contiguous() for k, v in stored.items()}
        save_file(exact, Path(plain) / "model.safetensors", {"format": "pt"})
        hf = json.loads((Path(plain) / "config.json").read_text())
        if name.startswith("kimi"):
            tensors = {f"language_model.{key}": value for key, value in tensors.items()}
            tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(2, 2)
            hf = {"model_type": "kimi_k25", "text_config": hf | {"model_type": "kimi_k2"}}
            hf["text_config"]["quantization_config"] = quantization
        else:
            hf |= {"quantization_config": quantization}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        save_reference(folder, plain)
        if own:
            compare(folder, plain)


def save_gpt_oss(name: str) -> None:
    folder = fresh(FOLDER / name)
    config = GptOssConfig(**GPT_OSS | {"intermediate_size": 32})
    with tempfile.TemporaryDirectory() as plain:
        model = random_model(config, torch.bfloat16)
        draw_vectors(model)
        model.save_pretrained(plain)
        tensors = load_file(Path(plain) / "model.safetensors")
        exact = {key: value.float() for key, value in tensors.items()}
        for key in sorted(tensors):
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            experts, width, out = tensors.pop(key).shape
            blocks = all_codes(256, experts, out, width // 32, 16).to(torch.uint8)
            powers = (121 + all_codes(3, experts, out, width // 32)).to(torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": powers}
            exact[key] = convert_moe_packed_tensors(blocks, powers, dtype=torch.float32)
            exact[key] = exact[key].contiguous()
        save_file(exact, Path(plain) / "model.safetensors", {"format": "pt"})
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        hf = json.loads((Path(plain) / "config.json").read_text())
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        hf["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
        (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        save_reference(folder, plain)
        compare(folder, plain)


def compare(folder: Path, plain: str) -> None:
    """transformers' own reading of the quantised folder gives the log-probs of the plain one."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = {
        "fp8": lambda: {"quantization_config": FineGrainedFP8Config(dequantize=True)},
        "mxfp4": lambda: {"quantization_config": Mxfp4Config(dequantize=True)},
    }.get(method, dict)()
    tokens = torch.arange(12)[None]
    out = []
    for source, options in ((folder, how), (plain, {})):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager", **options
        ).eval()
        with torch.no_grad():
            out.append(torch.log_softmax(model(tokens).logits, -1))
    gap = (out[0] - out[1]).abs().max().item()
    print(f"{folder.name}: transformers' own reading differs by at most {gap:.1e}")
    assert gap < 1e-3, folder


if __name__ == "__main__":
    main()
