"""One layer of a deployed model at its full width, through the real sampler and the real step.

    python experiments/full_width.py --model kimi_k2
    python experiments/full_width.py --model gpt_oss_120b --experts 16

Nothing is downloaded: the layer has random codes in the format that the model is deployed in, and
as many experts as half of the free memory holds unless told. Rollouts are sampled and trained on
with a random adapter on every linear layer; the log-prob gap must be exactly 0. Prints a table and
writes it, with the seconds and bytes, to `<out>/full_width_<model>.json`.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from orbit_jax import parity
from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.config import Config, PPOConfig, SamplerConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.weights import Weight, weights
from orbit_jax.quant.qtensor import QTensor
from orbit_jax.rl import sampler
from orbit_jax.rl.advantages import group_relative
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.train_state import init_state

VOCAB = 1024  # rows of embedding and head that are kept: they are not part of the layer
GROUP = 32
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
MODELS = {
    "kimi_k2": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
        "max_position_embeddings": 131072,
    },
    "gpt_oss_120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": YARN | {"truncate": False},
        "max_position_embeddings": 131072,
    },
}
# Format of the experts, type of its scales, and the standard deviation of its random codes.
EXPERTS = {"kimi_k2": ("int4", "bfloat16", 4.6), "gpt_oss_120b": ("e2m1", "float8_e8m0fnu", 2.7)}


def model_config(model: str, experts: int) -> ModelConfig:
    fields = {"n_routed_experts", "num_local_experts"} & MODELS[model].keys()
    small = {"vocab_size": VOCAB, "num_hidden_layers": 1} | dict.fromkeys(fields, experts)
    return ModelConfig.from_hf(MODELS[model] | small)


def random_base(model: str, config: ModelConfig, rng: np.random.Generator) -> dict:
    """Random codes drawn as they lie in memory: no wide weight ever exists."""
    form, scale_dtype, deviation = EXPERTS[model]

    def draw(path: tuple, weight: Weight) -> QTensor | jax.Array:
        shape, width = (*weight.lead, *weight.shape), weight.shape[-1]
        if weight.kind == "Vector":
            around = 1.0 if path[-1].key.endswith("norm") else 0.0
            return jnp.asarray(around + 0.1 * rng.standard_normal(shape, np.float32), jnp.bfloat16)
        if "experts" not in [getattr(key, "key", None) for key in path]:
            values = rng.standard_normal(shape, np.float32) / np.sqrt(width, dtype=np.float32)
            values = values.astype(jnp.bfloat16).view(np.uint16)
            return QTensor(jnp.asarray(values), None, None, format="bfloat16")
        codes = rng.integers(0, 256, (*shape[:-1], width // 2), np.uint8)
        dtype = jnp.dtype(scale_dtype)
        size = 2.0 ** np.round(np.log2(1 / deviation / np.sqrt(width)))
        scales = np.full((*shape[:-1], width // GROUP), size, dtype)
        scales = jnp.asarray(scales.view(f"uint{8 * dtype.itemsize}"))
        return QTensor(
            jnp.asarray(codes), scales, None, form, scale_dtype=scale_dtype, group_size=GROUP
        )

    return jax.tree_util.tree_map_with_path(draw, weights(config))


def experts_that_fit(model: str) -> int:
    """As many experts as half of the free memory holds with their adapters, at most all."""
    facts = MODELS[model]
    most = facts.get("n_routed_experts") or facts["num_local_experts"]
    sizes = [
        sum(np.prod((*w.lead, *w.shape)) for w in jax.tree.leaves(weights(model_config(model, n))))
        for n in (16, 17)
    ]
    per_expert = float(sizes[1] - sizes[0]) * 0.75  # codes, scales, adapter and its moments
    return max(8, min(most, int(psutil.virtual_memory().available / 2 / per_expert)))


def check(model: str, experts: int, rank: int, tokens: int) -> dict:
    """Gap, seconds and bytes of one layer."""
    config = Config(
        sampler=SamplerConfig(
            prompts_per_step=2,
            group_size=4,
            max_prompt_tokens=tokens // 2,
            max_completion_tokens=tokens // 2,
        ),
        ppo=PPOConfig(micro_batches=1, token_buckets=(1.0,)),
    )
    layer = model_config(model, experts)
    rng = np.random.default_rng(0)
    base = random_base(model, layer, rng)
    policy = attach(LoRA(rank, 2.0 * rank), jax.random.key(0), base)
    state = init_state(config.optimizer, policy, None)
    slots = sampler.empty_state(layer, config.rows, config.num_slots, 1)
    prompts = [rng.integers(0, VOCAB, tokens // 2).tolist() for _ in range(2)]
    began = time.monotonic()
    gaps, _ = parity.measure(
        parity.build("fast", layer, config),
        config,
        base,
        state,
        slots,
        prompts,
        (0,),
        ppo_clip,
        group_relative,
    )
    return {
        "model": model,
        "experts": experts,
        "width": layer.hidden_size,
        "tokens": config.rows * config.num_slots,
        "parity_max_abs_diff": max(gaps.values()),
        "base_bytes": base_bytes(base),
        "adapter_parameters": sum(p.size for p in jax.tree.leaves(policy.params)),
        "seconds": round(time.monotonic() - began, 1),
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="kimi_k2")
    parser.add_argument("--experts", type=int, default=0, help="0: as many as memory holds")
    parser.add_argument("--rank", type=int, default=4, help="of LoRA")
    parser.add_argument("--tokens", type=int, default=32, help="prompt and completion of a row")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    most = MODELS[args.model]["num_experts_per_tok"]
    if args.experts and args.experts < most:
        sys.exit(f"--experts={args.experts}: a token of {args.model} visits {most}, give as many")
    result = check(args.model, args.experts or experts_that_fit(args.model), args.rank, args.tokens)
    for name, value in result.items():
        print(f"{name:22}{value}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"full_width_{args.model}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")
    if result["parity_max_abs_diff"] != 0.0:
        sys.exit("the log-probs of sampler and trainer differ")


if __name__ == "__main__":
    main()
