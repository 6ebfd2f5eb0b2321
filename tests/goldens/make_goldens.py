"""Remakes the goldens beside this file with torch, transformers and compressed-tensors.

Development only: `make goldens`, in an environment with those packages (written with torch 2.13.0,
transformers 5.24.0, compressed-tensors 0.20.1). Each folder is a tiny random checkpoint with
`reference.npz`: `tokens` int32 `[B, T]` and `logprobs` f32 `[B, T, V]` of the model in float32.
Quantised ones add `weights.npz`: compressed-tensors' own decode of every quantised module, as the
bits of the scales' type.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

FOLDER = Path(__file__).parent
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def main() -> None:
    moe = Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True)
    save_plain("qwen3_moe", moe, torch.bfloat16)
    few = {"num_experts": 4, "moe_intermediate_size": 16, "rope_theta": 1e6}
    mixed = Qwen3MoeConfig(**SMALL | EXPERTS | few, norm_topk_prob=False, mlp_only_layers=[0])
    save_plain("qwen3_moe_first_dense", mixed, torch.bfloat16)
    narrow = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}
    save_plain("qwen3_tied", Qwen3Config(**narrow, tie_word_embeddings=True), torch.float32)
    save_plain("llama_sharded", LlamaConfig(**SMALL | {"head_dim": 8}), torch.float16, "20KB")

    few = {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 32}
    moe = Qwen3MoeConfig(**SMALL | EXPERTS | few)
    experts_and_attention = {"Linear": QuantizationArgs(num_bits=4, group_size=32)}
    save_quantised("int4_symmetric", moe, torch.bfloat16, experts_and_attention)
    # 36 rows and 36 columns fill neither a word of codes nor a word of zero points.
    odd = Qwen3Config(**narrow | {"intermediate_size": 36}, tie_word_embeddings=True)
    schemes = {
        r"re:.*(q|k|v|o|gate|up)_proj$": QuantizationArgs(
            num_bits=4, group_size=16, symmetric=False
        ),
        r"re:.*down_proj$": QuantizationArgs(num_bits=4, strategy="channel"),
    }
    save_quantised("int4_asymmetric", odd, torch.bfloat16, schemes)
    schemes = {
        "re:.*self_attn.*": QuantizationArgs(num_bits=8, group_size=16, symmetric=False),
        "re:.*mlp.*": QuantizationArgs(num_bits=8, strategy="channel"),
    }
    llama = LlamaConfig(**SMALL | {"head_dim": 8, "num_hidden_layers": 1, "intermediate_size": 34})
    save_quantised("int8", llama, torch.float16, schemes)


def save_plain(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, max_shard_size: str = "5GB"
) -> None:
    """Saves a random model with transformers, and its log-probs."""
    folder = fresh(FOLDER / name)
    random_model(config, dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink()
    save_reference(folder, folder)


def save_quantised(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    schemes: dict[str, QuantizationArgs],
) -> None:
    """Saves a random model quantised by compressed-tensors, its decode and its log-probs."""
    folder = fresh(FOLDER / name)
    groups = {
        f"group_{i}": QuantizationScheme(targets=[target], weights=args)
        for i, (target, args) in enumerate(schemes.items())
    }
    ignore = ["lm_head", r"re:.*mlp\.gate$"]
    quantization = QuantizationConfig(
        config_groups=groups,
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore,
    )
    with tempfile.TemporaryDirectory() as plain:
        random_model(config, dtype).save_pretrained(plain)
        tensors = load_file(Path(plain) / "model.safetensors")
        decoded, exact = {}, dict(tensors)
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            module = key.removesuffix(".weight")
            scheme = next(s for s in groups.values() if s.targets[0] == target_of(module, schemes))
            packed = compress(tensors.pop(key), scheme)
            tensors |= {f"{module}.{suffix}": value for suffix, value in packed.items()}
            decoded[module] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
            in_f32 = packed | {"weight_scale": packed["weight_scale"].float()}
            exact[key] = PackedQuantizationCompressor.decompress(in_f32, scheme)["weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        text = json.loads((Path(plain) / "config.json").read_text())
        text["quantization_config"] = quantization.model_dump(mode="json")
        (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")
        save_file(exact, Path(plain) / "model.safetensors", {"format": "pt"})
        save_reference(folder, plain)
    bits = {module: weight.view(torch.uint16).numpy() for module, weight in decoded.items()}
    np.savez_compressed(folder / "weights.npz", **bits)


def target_of(module: str, schemes: dict[str, QuantizationArgs]) -> str:
    """The first target that names a module: a class, or a pattern of the last parts of its name."""
    return next(target for target in schemes if target == "Linear" or match_name(module, target))


def compress(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """Quantises and packs one weight by min and max, as compressed-tensors stores it."""
    args = scheme.weights
    grouped = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    scale, zero_point = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {
        "weight": weight,
        "weight_scale": scale.to(weight.dtype),
        "weight_zero_point": zero_point.round().to(torch.int8),
    }
    return PackedQuantizationCompressor.compress(state, scheme)


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A model whose norms are random too, so that a norm in the wrong place shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def save_reference(folder: Path, plain: str | Path) -> None:
    """Writes tokens and the log-probs that the plain checkpoint gives in float32."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 12))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits, -1).numpy()
    spread = logprobs.max(-1) - logprobs.min(-1)
    print(f"{folder.name}: log-probs spread over {spread.mean():.1f} nats")
    reference = {"tokens": tokens.numpy().astype(np.int32), "logprobs": logprobs}
    np.savez_compressed(folder / "reference.npz", **reference)


def fresh(folder: Path) -> Path:
    """An empty folder in the place of an older one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
