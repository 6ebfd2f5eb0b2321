r"""Pretrains a tiny mixture of experts that has seen tools and programs, and quantises it to INT4.

    python experiments/build_agent_base.py --out runs/tiny_agent_int4

The base of `ppo_tools.py` and `ppo_code.py`: the architecture and the two phases of
`build_tiny_base.py`, on three kinds of train-side problems in equal parts.
  - sums (`7+8-3`): worked, or answered at once;
  - products of three numbers (`27*43*16`): by a tool that multiplies two of them
    (`<tool>27*43</tool>`, told `<result>1161</result>`, `<tool>1161*16</tool>`, ...), or at once,
    which nobody can do in the head;
  - functions (`f(0)=57;f(1)=63;f(2)=69`): the right program, or one that fits the first value only.
Phase 1 has the good answers alone, phase 2 mostly the bad ones, for a fixed number of steps.
"""

import argparse
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from build_tiny_base import HF_CONFIG, make_optimizer, make_step

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.byte_tokenizer import build_byte_tokenizer
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.checkpoint.write_huggingface import save_base
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.rl.packing import pack
from orbit_jax.runs.environment import describe_environment
from orbit_jax.tasks.functions import function_stream, lazy_program, program
from orbit_jax.tasks.problems import direct_solution, train_problem_stream, worked_solution

TOKENS, ROWS, SLOTS = 4096, 96, 128  # of a training batch
GOOD_SHARE = {"sums": 0.25, "products": 0.15, "functions": 0.3}  # of the corpus of phase 2
Said = tuple[str, str]  # who, and what


def with_tool(prompt: str) -> list[Said]:
    """The turns that multiply three numbers two at a time."""
    first, second, third = map(int, prompt.split("*"))
    return [
        ("assistant", f"<tool>{first}*{second}</tool>"),
        ("tool", f"<result>{first * second}</result>"),
        ("assistant", f"<tool>{first * second}*{third}</tool>"),
        ("tool", f"<result>{first * second * third}</result>"),
        ("assistant", rf"\boxed{{{first * second * third}}}"),
    ]


def dialogues(seed: int, good: dict[str, float]) -> Iterator[tuple[str, list[Said]]]:
    """Prompts and what follows them, without end, one kind after the other."""
    rng = np.random.default_rng(seed)
    sums = train_problem_stream(seed + 1, ("3x1", "4x1"))
    products = train_problem_stream(seed + 2, ("product3x2",))
    functions = function_stream(seed + 3)
    for kind in itertools.cycle(good):
        well = rng.random() < good[kind]
        if kind == "sums":
            problem = next(sums)
            solution = worked_solution if well else direct_solution
            yield problem.prompt, [("assistant", solution(problem.prompt))]
        elif kind == "products":
            problem = next(products)
            at_once = [("assistant", rf"\boxed{{{problem.answer}}}")]
            yield problem.prompt, with_tool(problem.prompt) if well else at_once
        else:
            example = next(functions)
            yield example.prompt, [("assistant", (program if well else lazy_program)(example))]


def batches(tokenizer: Tokenizer, seed: int, good: dict[str, float]) -> Iterator[dict]:
    """Streams of whole dialogues; only what the assistant says counts."""
    rows: list[list[tuple[int, bool]]] = []
    for prompt, said in dialogues(seed, good):
        row, messages = [], [{"role": "user", "content": prompt}]
        for role, text in said:
            if role == "assistant":
                known = tokenizer.encode_chat(messages)
                row += [(i, False) for i in known[len(row) :]]
                row += [(i, True) for i in (*tokenizer.encode(text), tokenizer.eos_ids[0])]
            messages.append({"role": role, "content": text})
        if len(rows) == ROWS or sum(map(len, rows)) + len(row) > TOKENS:
            yield lay_out(rows)
            rows = []
        rows.append(row)


def lay_out(rows: Sequence[Sequence[tuple[int, bool]]]) -> dict[str, np.ndarray]:
    """One batch; `weight` is 1 where the next token is the assistant's."""
    ids = [(i, 0, [token for token, _ in row]) for i, row in enumerate(rows)]
    counts = [(i, 0, [int(counts) for _, counts in row]) for i, row in enumerate(rows)]
    packed = pack(ids, ROWS, 1, TOKENS)
    return {
        "tokens": packed.tokens,
        "rows": packed.rows,
        "positions": packed.positions,
        "targets": np.roll(packed.tokens, -1),
        "weight": np.roll(pack(counts, ROWS, 1, TOKENS).tokens, -1).astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1500, help="of phase 1")
    parser.add_argument("--more", type=int, default=40, help="steps of phase 2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_byte_tokenizer(args.out)
    tokenizer = Tokenizer.load(args.out)
    config = ModelConfig.from_hf(HF_CONFIG)
    weights = init_weights(config, jax.random.key(args.seed))
    optimizer = make_optimizer(args.steps)
    state = optimizer.init(weights)
    step = make_step(config, optimizer, ROWS, SLOTS, TOKENS)
    good = batches(tokenizer, args.seed, dict.fromkeys(GOOD_SHARE, 1.0))
    mixed = batches(tokenizer, args.seed + 100, GOOD_SHARE)
    steps = [good] * args.steps + [mixed] * args.more
    began = time.monotonic()
    for i, source in enumerate(steps):
        weights, state, loss = step(weights, state, next(source))
        if i % 50 == 0 or i + 1 == len(steps):
            speed = (i + 1) / (time.monotonic() - began)
            print(
                f"step {i + 1}/{len(steps)} loss {loss:.4f} {speed:.2f} steps/s "
                f"ETA {(len(steps) - i - 1) / speed:.0f} s",
                flush=True,
            )
    save_base(args.out, HF_CONFIG, compiler.jit(functools.partial(freeze, config), {})(weights))
    report = {
        "command": f"python experiments/build_agent_base.py --steps {args.steps} "
        f"--more {args.more} --seed {args.seed}",
        "sha256": hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest(),
        "environment": {
            k: v for k, v in describe_environment().items() if k not in ("command", "git_commit")
        },
    }
    (args.out / "build.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
