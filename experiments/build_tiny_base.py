r"""Pretrains the tiny mixture of experts that the repository ships, and quantises it to INT4."""

import argparse
import dataclasses
import functools
import hashlib
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orbit_jax import compile
from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.huggingface import load_base
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.model import transformer
from orbit_jax.model.attention import empty_cache
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.stream import Stream
from orbit_jax.tasks.grading import grade
from orbit_jax.tasks.problems import (
    Problem,
    direct_solution,
    generate_problems,
    is_heldout,
    train_problem_stream,
    worked_solution,
)

import os

HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 288,
    "hidden_size": 128,
    "num_hidden_layers": int(os.environ.get("NL", 3)),
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
DIFFICULTIES = ("2x1", "2x2", "2x2", "3x1", "3x2", "3x2", "3x2", "4x1")
WORKED_SHARE = 0.25
import os

TOKENS = int(os.environ.get("TOK", 4096))
ROWS, SLOTS = TOKENS // 20, 48


def write_completion(problem: Problem, rng: np.random.Generator, args, share) -> str:
    if rng.random() < share:
        return worked_solution(problem.prompt)
    if rng.random() < args.noise:
        return rf"\boxed{{{int(problem.answer) + int(rng.choice([-1, 1])) * int(rng.integers(1, 11))}}}"
    return direct_solution(problem.prompt)


def batches(tokenizer: Tokenizer, args) -> Iterator[dict[str, np.ndarray]]:
    """Streams of TOKENS tokens that hold whole rows."""
    rng = np.random.default_rng(args.seed)
    rows: list[tuple[list[int], list[int]]] = []
    total = done = 0
    diffs = tuple(args.difficulties.split(","))
    for problem in train_problem_stream(args.seed + 1, diffs):
        assert not is_heldout(problem.prompt)
        prompt = tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
        completion = tokenizer.encode(
            write_completion(
                problem, rng, args, args.early if done < args.stable else args.worked
            )
            + "<|end|>"
        )
        length = len(prompt) + len(completion)
        if total + length > TOKENS or len(rows) == ROWS:
            yield pack(rows)
            done += 1
            rows, total = [], 0
        rows.append((prompt, completion))
        total += length


def pack(rows) -> dict[str, np.ndarray]:
    batch = {
        "tokens": np.zeros(TOKENS, np.int32),
        "rows": np.full(TOKENS, ROWS, np.int32),
        "positions": np.zeros(TOKENS, np.int32),
        "targets": np.zeros(TOKENS, np.int32),
        "counts": np.zeros(TOKENS, np.float32),
    }
    start = 0
    for i, (prompt, completion) in enumerate(rows):
        ids = prompt + completion
        part = slice(start, start + len(ids))
        batch["tokens"][part] = ids
        batch["rows"][part] = i
        batch["positions"][part] = np.arange(len(ids))
        batch["targets"][part] = ids[1:] + [0]
        batch["counts"][start + len(prompt) - 1 : start + len(ids) - 1] = 1.0
        start += len(ids)
    return batch


def make_step(config, optimizer):
    def loss_fn(weights, batch):
        stream = Stream(batch["tokens"], batch["rows"], batch["positions"], ROWS, SLOTS)
        hidden, _, load = transformer.apply(config, weights, None, stream)
        logprobs, _ = transformer.score(config, weights, hidden, batch["targets"], jnp.ones(TOKENS))
        return -(logprobs * batch["counts"]).sum() / batch["counts"].sum(), load

    def step(weights, state, batch):
        (loss, load), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights, batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss, load

    return compile.jit(step, compile.options("fast"), donate_argnames=("weights", "state"))


def generate(config, base, tokenizer, problems, temperature, key, force="", new=56):
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": p.prompt}])
        + tokenizer.encode(
            force and worked_solution(p.prompt)[: len(p.prompt.split()[0]) + 1]
            if force == "worked"
            else force
        )
        for p in problems
    ]
    b, slots = len(prompts), max(map(len, prompts)) + new
    lengths = np.array([len(p) for p in prompts], np.int32)
    flat = np.concatenate([np.array(p, np.int32) for p in prompts])
    rows = np.repeat(np.arange(b, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    ids = _generate(
        config,
        base,
        flat,
        rows,
        positions,
        lengths,
        jnp.float32(temperature),
        key,
        b,
        slots,
        new,
        tokenizer.eos_ids[0],
    )
    out = []
    for p, row, pr in zip(problems, np.asarray(ids), prompts):
        row = row.tolist()
        row = row[: row.index(tokenizer.eos_ids[0])] if tokenizer.eos_ids[0] in row else row
        full = pr[len(tokenizer.encode_chat([{"role": "user", "content": p.prompt}])) :] + row
        out.append(tokenizer.decode(full))
    return out


def _gen(config, base, flat, rows, positions, lengths, temperature, key, b, slots, new, eos):
    cache = empty_cache(config, b, slots)
    stream = Stream(flat, rows, positions, b, slots)
    hidden, cache, _ = transformer.apply(config, base, None, stream, cache)
    last = hidden[jnp.cumsum(lengths) - 1]

    def pick(hidden, key):
        z = transformer.logits(base, hidden)
        return jnp.where(
            temperature > 0,
            jax.random.categorical(key, z / jnp.maximum(temperature, 1e-6)),
            z.argmax(-1),
        ).astype(jnp.int32)

    def one(carry, xs):
        token, cache, done = carry
        i, key = xs
        stream = Stream(
            token, jnp.where(done, b, jnp.arange(b)), lengths + i, b, slots, decode=True
        )
        hidden, cache, _ = transformer.apply(config, base, None, stream, cache)
        nxt = pick(hidden, key)
        return (nxt, cache, done | (token == eos)), token

    keys = jax.random.split(key, new + 1)
    first = pick(last, keys[0])
    _, ids = jax.lax.scan(one, (first, cache, jnp.zeros(b, bool)), (jnp.arange(new), keys[1:]))
    return ids.T


_generate = compile.jit(
    _gen, compile.options("fast"), static_argnames=("config", "b", "slots", "new", "eos")
)


def evaluate(config, base, tokenizer, data, seed=0, show=0, full=True, only=''):
    result = {}
    for part, problems in (("heldout", data.heldout), ("unseen", data.unseen)):
        for name, temp, force in (
            ("greedy", 0.0, ""),
            ("sampled", 1.0, ""),
            ("worked_greedy", 0.0, "worked"),
            ("worked_sampled", 1.0, "worked"),
            ("direct_greedy", 0.0, "\\boxed{"),
            ("direct_sampled", 1.0, "\\boxed{"),
        ):
            if only and only != f'{part}/{name}':
                continue
            if not full and part == "unseen" and not name.startswith("worked"):
                continue
            texts = generate(config, base, tokenizer, problems, temp, jax.random.key(seed), force)
            ok = np.array([grade(t, p.answer).value for t, p in zip(texts, problems)])
            worked = np.array([not t.startswith("\\boxed") for t in texts])
            diff = np.array([p.difficulty for p in problems])
            row = {"all": ok.mean(), "worked_share": worked.mean()}
            row |= {d: ok[diff == d].mean() for d in map(str, sorted(set(diff)))}
            result[f"{part}/{name}"] = {k: round(float(v), 3) for k, v in row.items()}
            print(f"  {part}/{name}", result[f"{part}/{name}"], flush=True)
            if show and not force:
                for p, t, o in list(zip(problems, texts, ok))[:show]:
                    print("     ", p.prompt, "=>", t, int(o))
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--worked", type=float, default=WORKED_SHARE)
    parser.add_argument("--early", type=float, default=0.9)
    parser.add_argument("--stable", type=int, default=3000)
    parser.add_argument("--decay", type=int, default=600)
    parser.add_argument("--resume", default="")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--difficulties", default=",".join(DIFFICULTIES))
    parser.add_argument("--out", default="/tmp/base")
    args = parser.parse_args()
    out = Path(args.out)
    build_byte_tokenizer(out)
    tokenizer = Tokenizer.load(out)
    config = ModelConfig.from_hf(HF_CONFIG)
    train_config = dataclasses.replace(config, expert_block=args.block)
    weights = init_weights(config, jax.random.key(args.seed))
    osc = float(os.environ.get("OSC", 1))
    gsc = float(os.environ.get("GSC", 1))
    for st in weights["layers"]:
        st["self_attn"]["o_proj"] *= osc
        st["mlp"]["experts"]["down_proj"] *= osc
        st["mlp"]["gate"] *= gsc
    args.steps = args.stable + args.decay
    schedule = optax.join_schedules([optax.linear_schedule(0.0, args.lr, 100), optax.constant_schedule(args.lr), optax.linear_schedule(args.lr, 0.0, args.decay)], [100, args.stable])
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.02)
    )
    state = optimizer.init(weights)
    step = make_step(train_config, optimizer)
    data = generate_problems(0)
    stream = batches(tokenizer, args)
    start = time.monotonic()
    first = 0
    if args.resume:
        first, leaves = pickle.load(open(args.resume, "rb"))
        weights, state = jax.tree.unflatten(jax.tree.structure((weights, state)), [jnp.asarray(l) for l in leaves])
        for _ in range(first):
            next(stream)
    for i in range(first, args.steps):
        weights, state, loss, load = step(weights, state, next(stream))
        if i == 1:
            start = time.monotonic()
            loss.block_until_ready()
        if i % 50 == 0 or i == args.steps - 1:
            loss = float(loss)
            rate = max(i - first - 1, 1) / (time.monotonic() - start + 1e-9)
            l = np.asarray(load)
            l = l / l.sum(1, keepdims=True)
            print(
                f"step {i} loss {loss:.4f} {rate:.2f} steps/s ETA {(args.steps - i) / rate:.0f}s load min {l.min():.3f} max {l.max():.3f}",
                flush=True,
            )
        if args.every and (i + 1) % args.every == 0 and i + 1 < args.steps:
            pickle.dump((i + 1, [np.asarray(l) for l in jax.tree.leaves((weights, state))]), open(out / f"state{i + 1}.pkl", "wb"))
            frozen = jax.jit(freeze)(weights)
            evaluate(config, frozen, tokenizer, data, only="heldout/worked_greedy")
    frozen = jax.jit(freeze)(weights)
    save_base(out, HF_CONFIG, frozen)
    print(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest())
    if args.every:
        evaluate(config, frozen, tokenizer, data, show=10)
        print("unquantised")
        evaluate(config, weights, tokenizer, data, full=False)


if __name__ == "__main__":
    main()
