"""Remakes the goldens of `families/`: tiny random checkpoints of every family of models.

Development only: `make goldens`. Each folder is a checkpoint as its family is deployed, with
`reference.npz` of transformers' model in float32: `tokens` int32 `[B, T]`, of which the last 8 are
what its greedy decoding appends to the others, `logprobs` f32 `[B, T, V]` and `experts` int8
`[L, B, T, k]`, the chosen experts of each sparse layer, ascending.
"""

import json
from pathlib import Path

import numpy as np
import torch
from make_goldens import EXPERTS, SMALL, fresh, random_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

FOLDER = Path(__file__).parent / "families"
ROUTERS = ("TopKRouter", "TopkRouter")
NEW_TOKENS = 8

GROUPED = {k: v for k, v in SMALL.items() if k != "head_dim"}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = (
    GROUPED
    | LATENT
    | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    }
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_OSS = SMALL | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": YARN | {"truncate": False},
}

CASES: dict[str, PreTrainedConfig] = {
    "llama_stretched_biased": LlamaConfig(
        **SMALL | {"head_dim": 8}, attention_bias=True, rope_parameters=LLAMA3
    ),
    "llama_linear": LlamaConfig(
        **GROUPED,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    "qwen3_yarn": Qwen3Config(**SMALL | {"hidden_size": 30}, rope_parameters=YARN),
    "qwen3_moe_one_expert": Qwen3MoeConfig(
        **SMALL | EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1}, tie_word_embeddings=True
    ),
    "qwen3_moe_many_experts": Qwen3MoeConfig(
        **SMALL | EXPERTS | {"num_experts": 24, "num_experts_per_tok": 8, "num_hidden_layers": 3},
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral_window_tied": MixtralConfig(
        **GROUPED | {"intermediate_size": 20, "num_key_value_heads": 1},
        num_local_experts=3,
        num_experts_per_tok=1,
        sliding_window=5,
        tie_word_embeddings=True,
    ),
    "olmoe": OlmoeConfig(
        **GROUPED | {"num_key_value_heads": 4}, num_experts=8, num_experts_per_tok=3
    ),
    "olmoe_clipped_grouped": OlmoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.8
    ),
    "deepseek_v3": DeepseekV3Config(
        **DEEPSEEK, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "deepseek_v3_plain_queries_no_groups_tied": DeepseekV3Config(
        **DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_hidden_layers": 2,
            "hidden_size": 36,
            "intermediate_size": 26,
        },
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_interleave=False,
    ),
    "gpt_oss": GptOssConfig(**GPT_OSS),
    "gpt_oss_no_window_small_limit": GptOssConfig(
        **GPT_OSS | {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 20},
        layer_types=["full_attention"],
        swiglu_limit=0.5,
        tie_word_embeddings=True,
    ),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, config in CASES.items():
        folder = fresh(FOLDER / name)
        model = random_model(config, torch.bfloat16)
        draw_vectors(model)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        save_reference(folder, folder)
    save_kimi(FOLDER / "kimi_k25")


def draw_vectors(model: torch.nn.Module) -> None:
    """Biases, sinks and corrections around zero; routers that prefer by a margin."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks")):
                tensor.uniform_(-0.5, 0.5)


def save_kimi(folder: Path) -> None:
    """A DeepSeek-V3 model as the text part of Kimi-K2.5: other names, and a vision tower beside."""
    source = FOLDER / "deepseek_v3"
    fresh(folder)
    tensors = load_file(source / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.encoder.blocks.0.norm0.weight"] = torch.ones(8)
    renamed["mm_projector.proj.0.weight"] = torch.ones(4, 8)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"model_type": "kimi_k25_vision", "hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_reference(folder, source)


def save_reference(folder: Path, source: str | Path) -> None:
    """Writes what transformers computes in float32 from the plain checkpoint in `source`."""
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    torch.manual_seed(1)
    given = torch.randint(0, model.config.vocab_size, (2, 14))
    model.generation_config.eos_token_id = None  # no token ends it, and none is avoided
    with torch.no_grad():
        tokens = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    chosen: list[np.ndarray] = []

    def record(module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        experts = outputs[-1].reshape(*tokens.shape, -1)
        chosen.append(experts.sort(-1).values.numpy().astype(np.int8))

    for module in model.modules():
        if type(module).__name__.endswith(ROUTERS):
            module.register_forward_hook(record)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits, -1).numpy()
    spread = logprobs.max(-1) - logprobs.min(-1)
    print(f"{folder.name}: log-probs spread over {spread.mean():.1f} nats")
    np.savez_compressed(
        folder / "reference.npz",
        tokens=tokens.numpy().astype(np.int32),
        logprobs=logprobs,
        experts=np.stack(chosen) if chosen else np.zeros((0, *tokens.shape, 0), np.int8),
    )


if __name__ == "__main__":
    main()
