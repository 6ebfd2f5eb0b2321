r"""Pretrains the tiny mixture of experts that the repository ships, and quantises it to INT4.

    python experiments/build_tiny_base.py --out runs/tiny_moe_int4

A base model for the demo: it has seen text of mixed quality. Both phases train on the train side
of generated sums (`7+8-3`; a problem that `is_heldout` never appears), with f32 master weights and
bf16 compute, through the same forward pass that PPO uses.
  1. Worked solutions, step by step (`7+8=15;15-3=12;\boxed{12}`): it learns to calculate.
  2. A corpus in which three of four answers come at once (`\boxed{12}`) and one is worked. Training
     stops as soon as the INT4 model solves between a quarter and a half of the held-out problems,
     greedy and at temperature 1. By then it mostly answers at once, and is often wrong; that
     showing its work pays is for PPO to find out.
The seed rebuilds the same bytes on the same jaxlib and CPU features; the last line says whether
they are those of the shipped base.
"""

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.model import head, transformer
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.stream import Stream
from orbit_jax.rl import sampler
from orbit_jax.rl.packing import pack
from orbit_jax.rl.rollouts import generate
from orbit_jax.runs.environment import describe_environment
from orbit_jax.tasks.grading import grade
from orbit_jax.tasks.problems import (
    direct_solution,
    generate_problems,
    is_heldout,
    train_problem_stream,
    worked_solution,
)
from orbit_jax.tasks.task import Example

HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 288,  # 256 bytes, five special tokens, rounded up to a multiple of 32
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
TOKENS, ROWS, SLOTS = 4096, 160, 64  # of a training batch
PEAK_RATE, LAST_RATE, WARMUP_STEPS, DECAY_STEPS = 3e-3, 5e-4, 100, 200
WORKED_SHARE = 0.25  # of the corpus of phase 2
WINDOW = (0.25, 0.5)  # pass rates at which phase 2 ends
CHECK_EVERY = 10  # steps of phase 2
SHIPPED = Path(__file__).parents[1] / "orbit_jax/assets/tiny_moe_int4"


def batches(tokenizer: Tokenizer, seed: int, worked_share: float) -> Iterator[dict]:
    """Streams of whole rows: prompt, then a worked or a direct solution, then `<|end|>`."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    prompts: list[int] = []
    for problem in train_problem_stream(seed + 1):
        assert not is_heldout(problem.prompt)
        prompt = tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
        solution = worked_solution if rng.random() < worked_share else direct_solution
        ids = prompt + tokenizer.encode(solution(problem.prompt)) + [tokenizer.eos_ids[0]]
        if len(rows) == ROWS or sum(map(len, rows)) + len(ids) > TOKENS:
            yield lay_out(rows, prompts)
            rows, prompts = [], []
        rows.append(ids)
        prompts.append(len(prompt))


def lay_out(rows: Sequence[Sequence[int]], prompts: Sequence[int]) -> dict[str, np.ndarray]:
    """One batch; `weight` is 1 where the next token belongs to a completion."""
    packed = pack([(i, 0, ids) for i, ids in enumerate(rows)], ROWS, 1, TOKENS)
    prompt = np.pad(np.asarray(prompts), (0, ROWS + 1 - len(rows)))[packed.rows]
    length = np.pad([len(ids) for ids in rows], (0, ROWS + 1 - len(rows)))[packed.rows]
    counts = (packed.positions >= prompt - 1) & (packed.positions < length - 1)
    return {
        "tokens": packed.tokens,
        "rows": packed.rows,
        "positions": packed.positions,
        "targets": np.roll(packed.tokens, -1),
        "weight": counts.astype(np.float32),
    }


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW whose rate rises, stays, and has come down after so many steps of phase 1."""
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK_RATE, WARMUP_STEPS),
            optax.constant_schedule(PEAK_RATE),
            optax.linear_schedule(PEAK_RATE, LAST_RATE, DECAY_STEPS),
        ],
        [WARMUP_STEPS, max(steps - DECAY_STEPS, WARMUP_STEPS)],
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.02)
    )


def make_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    rows: int = ROWS,
    slots: int = SLOTS,
    tokens: int = TOKENS,
) -> compiler.Program:
    """Next-token prediction; the weights are plain arrays, so `apply` differentiates them."""

    def loss_fn(weights: dict, batch: dict) -> jax.Array:
        stream = Stream(batch["tokens"], batch["rows"], batch["positions"], rows, slots)
        hidden, _, _ = transformer.apply(config, weights, None, stream)
        ones = jnp.ones(tokens)
        logprobs, _ = head.score(config, weights, hidden, batch["targets"], ones)
        return -(logprobs * batch["weight"]).sum() / batch["weight"].sum()

    def step(weights: dict, state: optax.OptState, batch: dict):
        loss, grads = jax.value_and_grad(loss_fn)(weights, batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return compiler.jit(step, compiler.options("fast"), donate_argnames=("weights", "state"))


class Examiner:
    """Pass rates of a packed base, by the sampler that PPO uses."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.slots = sampler.empty_state(config, 512, SLOTS, 1)
        self.sample = compiler.jit(
            sampler.sample,
            compiler.options("fast"),
            static_argnames=("config", "filters"),
            donate_argnames=("state",),
        )

    def __call__(
        self, base: dict, problems: Sequence[Example], temperature: float, begin: str = ""
    ) -> dict[str, float]:
        """Overall, by difficulty, and the share that is worked; `begin` starts each completion.

        `begin="worked"` stands for the first term, with which a worked solution begins.
        """
        ask = lambda p: self.tokenizer.encode_chat([{"role": "user", "content": p.prompt}])  # noqa: E731
        starts = [p.prompt[0] if begin == "worked" else begin for p in problems]
        prompts = [ask(p) + self.tokenizer.encode(s) for p, s in zip(problems, starts, strict=True)]
        out, self.slots = generate(
            self.sample,
            self.config,
            base,
            None,
            self.slots,
            prompts,
            group_size=1,
            max_completion_tokens=SLOTS,
            stop_ids=self.tokenizer.eos_ids,
            temperature=temperature,
            seed=0,
            step=0,
        )
        texts = [s + self.tokenizer.decode(out.completion(i)) for i, s in enumerate(starts)]
        passed = [grade(t, p.answer).value for t, p in zip(texts, problems, strict=True)]
        by_kind: dict[str, list[float]] = {}
        for p, value in zip(problems, passed, strict=True):
            by_kind.setdefault(p.difficulty, []).append(value)
        worked = np.mean([not t.startswith(r"\boxed") for t in texts])
        figures = {"all": np.mean(passed), "worked": worked}
        figures |= {kind: np.mean(values) for kind, values in sorted(by_kind.items())}
        return {name: round(float(value), 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=900, help="of phase 1")
    parser.add_argument("--most", type=int, default=400, help="steps of phase 2 at the most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_byte_tokenizer(args.out)
    tokenizer = Tokenizer.load(args.out)
    config = ModelConfig.from_hf(HF_CONFIG)
    weights = init_weights(config, jax.random.key(args.seed))
    optimizer = make_optimizer(args.steps)
    state = optimizer.init(weights)
    step = make_step(config, optimizer)
    pack_base = compiler.jit(functools.partial(freeze, config), {})
    examine = Examiner(config, tokenizer)
    heldout = generate_problems(seed=0)["heldout"]

    began = time.monotonic()
    for i, batch in zip(range(args.steps), batches(tokenizer, args.seed, 1.0), strict=False):
        weights, state, loss = step(weights, state, batch)
        if i % 50 == 0 or i + 1 == args.steps:
            speed = (i + 1) / (time.monotonic() - began)
            print(
                f"phase 1 step {i + 1}/{args.steps} loss {loss:.4f} {speed:.2f} steps/s "
                f"ETA {(args.steps - i - 1) / speed:.0f} s",
                flush=True,
            )
    for i, batch in zip(range(args.most), batches(tokenizer, args.seed + 100, WORKED_SHARE)):  # noqa: B905
        weights, state, loss = step(weights, state, batch)
        if (i + 1) % CHECK_EVERY == 0:
            base = pack_base(weights)
            greedy, sampled = (examine(base, heldout, t) for t in (0.0, 1.0))
            print(
                f"phase 2 step {i + 1} loss {loss:.4f} greedy {greedy} sampled {sampled}",
                flush=True,
            )
            if all(WINDOW[0] <= r["all"] <= WINDOW[1] for r in (greedy, sampled)):
                break

    base = pack_base(weights)
    save_base(args.out, HF_CONFIG, base)
    shipped = json.loads((SHIPPED / "build.json").read_text())
    report = {
        "command": f"python experiments/build_tiny_base.py --steps {args.steps} --seed {args.seed}",
        "phase_2_steps": i + 1,
        "sha256": hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest(),
        "environment": {
            k: v for k, v in describe_environment().items() if k not in ("command", "git_commit")
        },
    }
    data = generate_problems(seed=0)
    for part, problems in (("heldout", data["heldout"]), ("unseen", data["unseen"])):
        for begin in ("", "worked", r"\boxed{"):
            for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
                label = f"{part}, {name}, begun as {begin or 'it likes'}"
                report[label] = examine(base, problems, temperature, begin)
    (args.out / "build.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    same = report["sha256"] == shipped["sha256"]
    print(f"the weights {'equal' if same else 'differ from'} those in {SHIPPED}")


if __name__ == "__main__":
    main()
