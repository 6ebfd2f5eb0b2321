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
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import psutil

from orbit_jax import parity
from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.checkpoint.placing import DEFAULT_PLACEMENT
from orbit_jax.checkpoint.source import Rehearsal
from orbit_jax.config import Config, PPOConfig, SamplerConfig
from orbit_jax.rl import sampler
from orbit_jax.rl.advantages import grpo
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.train_state import init_state

VOCAB = 1024  # rows of embedding and head that are kept: they are not part of the layer
MODELS = Path(__file__).parents[1] / "configs/models"
COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def facts_of(model: str) -> dict:
    return json.loads((MODELS / model / "config.json").read_text())


def experts_of(model: str) -> int:
    """As many as the model has."""
    return next(facts_of(model)[name] for name in COUNTS if name in facts_of(model))


def one_layer(model: str, experts: int, folder: str) -> Rehearsal:
    """The model's sparse layer with fewer experts: random weights, drawn as they lie in memory."""
    facts = facts_of(model)
    small = {"vocab_size": VOCAB, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    small |= dict.fromkeys(COUNTS & facts.keys(), experts)
    (Path(folder) / "config.json").write_text(json.dumps(facts | small))
    return Rehearsal(Path(folder), seed=0)


def experts_that_fit(model: str) -> int:
    """As many experts as half of the free memory holds with their adapters, at most all."""
    step = facts_of(model).get("n_group", 1)  # of groups that the router chooses among
    with tempfile.TemporaryDirectory() as folder:
        few, more = (one_layer(model, n, folder).nbytes() for n in (16 * step, 17 * step))
    # A third more for an adapter and its moments.
    fit = psutil.virtual_memory().available / 2 / ((more - few) * 4 / 3)
    return max(8, min(experts_of(model), int(fit) * step))


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
    with tempfile.TemporaryDirectory() as folder:
        source = one_layer(model, experts, folder)
        layer, base = source.config(), source.load(DEFAULT_PLACEMENT)
    policy = attach(LoRA(rank, 2.0 * rank), jax.random.key(0), base)
    state = init_state(config.optimizer, policy, None)
    slots = sampler.empty_state(layer, config.rows, config.num_slots, 1)
    rng = np.random.default_rng(0)
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
        grpo,
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
    parser.add_argument("--model", default="kimi_k2", help="of configs/models")
    parser.add_argument("--experts", type=int, default=0, help="0: as many as memory holds")
    parser.add_argument("--rank", type=int, default=4, help="of LoRA")
    parser.add_argument("--tokens", type=int, default=32, help="prompt and completion of a row")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    known = sorted(path.name for path in MODELS.iterdir())
    if args.model not in known:
        sys.exit(f"--model={args.model}: use one of {', '.join(known)}")
    least = facts_of(args.model)["num_experts_per_tok"]
    if args.experts and args.experts < least:
        sys.exit(f"--experts={args.experts}: a token of {args.model} visits {least}, give as many")
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
