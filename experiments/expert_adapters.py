"""Which adapter for routed experts? Each choice's quality on the tiny MoE, and its size on Kimi-K2.

    python experiments/expert_adapters.py --seeds 0 1
    python experiments/expert_adapters.py --steps 20 --arms none each:2 outer:8

An arm is what experts share, and a rank: `each:16` gives every expert factors of its own, `outer:8`
shares a layer's factors on the side of the residual stream, `all:16` shares both, `none` leaves the
experts alone. Attention has rank 16 in all of them. Each arm is trained by `ppo_math.run` on the
shipped base; a table of held-out rates and sizes goes to `expert_adapters.json` in --out.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
from ppo_math import run
from rich.console import Console
from rich.table import Table

from orbit_jax import startup
from orbit_jax.checkpoint.rehearsal import abstract_base
from orbit_jax.config import AdapterConfig, Config, EvaluationConfig, RunConfig
from orbit_jax.rl.train_state import trained_parameters

ARMS = ("none", "each:1", "each:2", "each:16", "outer:8", "outer:16", "all:16")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
LARGE = "configs/models/kimi_k2"
STORED = 4 + 8  # bytes of a trained parameter: f32, and Adam's moments


def adapter(arm: str, attention: tuple[str, ...]) -> AdapterConfig:
    """The adapter of an arm: rank 16 beside the experts."""
    if arm == "none":
        return AdapterConfig(targets=attention)
    shared, rank = arm.split(":")
    experts = tuple(f"experts.{name}" for name in EXPERTS)
    return AdapterConfig(
        targets=(*attention, *experts),
        overrides=tuple(f"{name}:{rank}" for name in experts),
        experts=shared,
    )


def parameters_of_the_large_model(arm: str) -> int:
    """Trained parameters of the arm on Kimi-K2, its shared experts adapted too."""
    model, base = abstract_base(LARGE)
    beside = (*LATENT, *(f"shared_experts.{name}" for name in EXPERTS))
    config = Config(adapter=adapter(arm, beside))
    make = functools.partial(startup.initial_state, config, model, base)
    return trained_parameters(jax.eval_shape(make))


def main() -> int:
    arguments = _arguments()
    rows = []
    for arm in arguments.arms:
        found = []
        for seed in arguments.seeds:
            config = Config(
                experiment=f"expert_adapters_{arm.replace(':', '')}",
                seed=seed,
                steps=arguments.steps,
                adapter=adapter(arm, ATTENTION),
                evaluation=EvaluationConfig(every_steps=1000),
                run=RunConfig(root=str(arguments.root)),
            )
            if arguments.quick:
                task = dataclasses.replace(config.task, heldout_problems=16, unseen_problems=0)
                sampler = dataclasses.replace(config.sampler, prompts_per_step=8, group_size=4)
                config = dataclasses.replace(config, task=task, sampler=sampler)
            found.append(run(config))
        large = parameters_of_the_large_model(arm)
        rows.append(
            {
                "arm": arm,
                "seeds": len(found),
                "trained": found[0]["adapter_bytes"] // 4,
                "heldout_before": float(np.mean([one["heldout_pass_before"] for one in found])),
                "heldout_after": [one["heldout_pass_after"] for one in found],
                "reward_last": [one["reward_last"] for one in found],
                "parity": max(one["parity_max_abs_diff"] for one in found),
                "trained_kimi_k2": large,
                "stored_gb_kimi_k2": STORED * large / 1e9,
            }
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "expert_adapters.json").write_text(json.dumps(rows, indent=2) + "\n")
    table = Table(box=None, header_style="bold")
    for head in ("arm", "trained", "held out, after", "last reward", "on Kimi-K2", "stored, GB"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['trained']:,}",
            ", ".join(f"{rate:.1%}" for rate in row["heldout_after"]),
            ", ".join(f"{reward:.3f}" for reward in row["reward_last"]),
            f"{row['trained_kimi_k2']:,}",
            f"{row['stored_gb_kimi_k2']:.1f}",
        )
    Console(width=110).print(table)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few and small rollouts")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="of the run folders")
    parser.add_argument("--out", type=Path, default=Path("experiments/reports"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
