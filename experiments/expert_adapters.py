"""Which adapter for routed experts? Each choice's quality on the tiny MoE, and its size on Kimi-K2.

    python experiments/expert_adapters.py --seeds 0 1
    python experiments/expert_adapters.py --steps 20 --arms none each:2 outer:8
    python experiments/expert_adapters.py --arms oft-each:8 oft-all:32 --rate 2e-3

An arm is what experts share, and a rank: `each:16` gives every expert factors of its own, `outer:8`
shares a layer's factors on the side of the residual stream, `all:16` shares both, `none` leaves the
experts as they are. `oft-each:8` has rotations in blocks of 8 instead, beside such in blocks of
32 on attention. Each is trained by `ppo_math.run` on the shipped base twice: beside factors of
rank 16 on attention, which learn the task by themselves, and alone, which tells the arms apart. The
mean reward over all steps says how fast it learnt. Held-out rates, rewards and sizes go to
`expert_adapters.json` in --out.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import jax
from ppo_math import run
from rich.console import Console
from rich.table import Table

from orbit_jax import startup
from orbit_jax.checkpoint.rehearsal import abstract_base
from orbit_jax.config import (
    AdapterConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
)
from orbit_jax.rl.train_state import trained_parameters

ARMS = ("none", "each:1", "each:2", "each:16", "outer:8", "outer:16", "all:16")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
LARGE = "configs/models/kimi_k2"
STORED = 4 + 8  # bytes of a trained parameter: f32, and Adam's moments
SHOWN = ("heldout_pass_after", "reward_mean", "reward_last")
OFT = "oft-"  # before the arms of it


def adapter(arm: str, beside: tuple[str, ...] = ()) -> AdapterConfig:
    """The adapter of an arm, and rank 16 or blocks of 32 on the weights beside the experts."""
    method = "oft" if arm.startswith(OFT) else "lora"
    arm = arm.removeprefix(OFT)
    if arm == "none":
        return AdapterConfig(method=method, targets=beside)
    shared, size = arm.split(":")
    experts = tuple(f"experts.{name}" for name in EXPERTS)
    return AdapterConfig(
        method=method,
        targets=(*beside, *experts),
        overrides=tuple(f"{name}:{size}" for name in experts),
        experts=shared,
    )


def parameters_of_the_large_model(arm: str) -> int:
    """Trained parameters of the arm on Kimi-K2, its shared experts adapted too."""
    model, base = abstract_base(LARGE)
    beside = (*LATENT, *(f"shared_experts.{name}" for name in EXPERTS))
    config = Config(adapter=adapter(arm, beside))
    make = functools.partial(startup.initial_state, config, model, base)
    return trained_parameters(jax.eval_shape(make))


def train(arguments: argparse.Namespace, chosen: AdapterConfig) -> dict[str, list[float]]:
    """The figures of one adapter's runs, a value for each seed."""
    found = []
    for seed in arguments.seeds:
        config = Config(
            experiment="expert_adapters",
            seed=seed,
            steps=arguments.steps,
            adapter=chosen,
            optimizer=OptimizerConfig(learning_rate=arguments.rate),
            evaluation=EvaluationConfig(every_steps=1000),
            run=RunConfig(root=str(arguments.root)),
        )
        if arguments.quick:
            task = dataclasses.replace(config.task, heldout_problems=16, unseen_problems=0)
            sampler = dataclasses.replace(config.sampler, prompts_per_step=8, group_size=4)
            ppo = dataclasses.replace(config.ppo, token_buckets=(1.0,))  # one program to compile
            config = dataclasses.replace(config, task=task, sampler=sampler, ppo=ppo)
        found.append(run(config))
        assert found[-1]["parity_max_abs_diff"] == 0
    trained = found[0]["adapter_bytes"] // 4
    return {"trained": trained} | {name: [one[name] for one in found] for name in SHOWN}


def main() -> int:
    arguments = _arguments()
    rows = []
    for arm in arguments.arms:
        large = parameters_of_the_large_model(arm)
        row = {"arm": arm, "learning_rate": arguments.rate}
        row["beside_attention"] = train(arguments, adapter(arm, ATTENTION))
        if not arm.endswith("none"):
            row["alone"] = train(arguments, adapter(arm))
        rows.append(row | {"trained_kimi_k2": large, "stored_gb_kimi_k2": STORED * large / 1e9})
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "expert_adapters.json").write_text(json.dumps(rows, indent=2) + "\n")
    show(rows)
    return 0


def show(rows: list[dict]) -> None:
    table = Table(box=None, header_style="bold")
    heads = ("arm", "trained", "held out", "mean reward", "alone: held out", "mean reward")
    for head in (*heads, "on Kimi-K2", "stored, GB"):
        table.add_column(head, justify="right")
    for row in rows:
        both = (row["beside_attention"], row.get("alone", {}))
        rates = [", ".join(f"{x:.1%}" for x in one.get("heldout_pass_after", ())) for one in both]
        means = [", ".join(f"{x:.3f}" for x in one.get("reward_mean", ())) for one in both]
        table.add_row(
            row["arm"],
            f"{row['beside_attention']['trained']:,}",
            *(rates[0], means[0], rates[1], means[1]),
            f"{row['trained_kimi_k2']:,}",
            f"{row['stored_gb_kimi_k2']:.1f}",
        )
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arms", nargs="+", type=_arm, default=ARMS, help="as each:2, oft-each:8, none or oft-none"
    )
    rate = OptimizerConfig().learning_rate
    parser.add_argument("--rate", type=float, default=rate, help="of learning")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="a run of each arm for each"
    )
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--quick", action="store_true", help="few and small rollouts")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="of the run folders")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="of expert_adapters.json")
    arguments = parser.parse_args()
    if arguments.steps < 1 or min(arguments.seeds) < 0 or arguments.rate <= 0:
        parser.error("--steps must be at least 1, --seeds at least 0, --rate above 0")
    return arguments


def _arm(text: str) -> str:
    if not re.fullmatch(f"({OFT})?(none|(each|outer|all):[1-9][0-9]?)", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no arm: give each, outer or all with a rank, as each:2, or none; with "
            "oft- before it, and the size of blocks, it is a rotation"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
