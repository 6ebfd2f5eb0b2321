"""Every algorithm and every adapter on the tiny task, over seeds: does each learn, and how fast?

    python experiments/algorithms.py --out experiments/reports
    python experiments/algorithms.py --arms gspo rloo oft_32 --seeds 0 --steps 20

An arm is some fields of `configs/tiny_moe.py`, all of which are in ARMS below. Each is trained by
`ppo_math.run` with every seed; all arms have their first seed before any has its second. What has
been run stands in `algorithms.json` in --out, and the same command goes on from there. The table,
printed and in `algorithms.md`, has medians over seeds of the held-out pass rate (greedy), of the
mean reward over all steps, which says how fast an arm learnt, and the largest log-prob gap, which
must be 0.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import jax
from ppo_math import run
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from configs import tiny_moe  # noqa: E402
from orbit_jax.config import Config, from_config_dict  # noqa: E402
from orbit_jax.runs.files import to_json, write_atomic  # noqa: E402
from orbit_jax.runs.printing import table  # noqa: E402

TWICE = {"ppo.minibatches": 2}  # updates of a batch: in the second the ratio is no longer 1
ARMS = {
    # Losses.
    "ppo_clip": TWICE,
    "dual_clip": TWICE | {"ppo.dual_clip": 3.0},
    "gspo": TWICE
    | {"ppo.loss": "gspo", "ppo.aggregation": "sequence_mean"}
    | {"ppo.clip_low": 3e-4, "ppo.clip_high": 4e-4},
    "cispo": TWICE | {"ppo.loss": "cispo", "ppo.clip_low": 1.0},
    "policy_gradient": TWICE | {"ppo.loss": "policy_gradient"},
    # Advantages, with the aggregation of their papers.
    "grpo": {"ppo.aggregation": "sequence_mean"},
    "dr_grpo": {"ppo.advantage": "dr_grpo", "ppo.aggregation": "constant_length"},
    "rloo": {"ppo.advantage": "rloo"},
    "reinforce": {"ppo.advantage": "reinforce"},
    "reinforce_pp": {"ppo.advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"ppo.advantage": "reinforce_pp_baseline"},
    "gae": TWICE | {"ppo.advantage": "gae"},
    # What goes with them.
    "dapo": {"ppo.dynamic_sampling": 4, "ppo.overlong_filter": True, "reward.length_buffer": 8},
    "kl_in_loss": {"ppo.kl": "loss", "ppo.kl_estimator": "k3", "ppo.kl_coefficient": 1e-3},
    "kl_in_reward": {"ppo.kl": "reward", "ppo.kl_coefficient": 1e-3},
    "kl_adaptive": {"ppo.kl": "loss", "ppo.kl_coefficient": 1e-3, "ppo.kl_target": 0.1},
    "entropy_bonus": {"ppo.entropy_coefficient": 1e-3},
    # Adapters.
    "lora_16": {},
    "lora_4": {"adapter.rank": 4, "adapter.alpha": 8.0},
    "rslora_16": {"adapter.rank_stabilized": True, "adapter.alpha": 8.0},
    "lora_gaussian": {"adapter.initialization": "gaussian"},
    "lora_orthogonal": {"adapter.initialization": "orthogonal"},
    "lora_outer": {"adapter.experts": "outer"},
    "lora_all": {"adapter.experts": "all"},
    "oft_32": {"adapter.method": "oft"},
    "oft_32_exact": {"adapter.method": "oft", "adapter.neumann_terms": 0},
    "oft_8": {"adapter.method": "oft", "adapter.block_size": 8},
    "oft_block_share": {"adapter.method": "oft", "adapter.block_share": True},
    "oft_all": {"adapter.method": "oft", "adapter.experts": "all"},
}
FIGURES = ("heldout_pass_after", "reward_mean", "parity_max_abs_diff", "adapter_bytes", "seconds")


def config_of(arm: str, seed: int, arguments: argparse.Namespace) -> Config:
    """The config of one run."""
    recipe = tiny_moe.get_config()
    recipe.update_from_flattened_dict(ARMS[arm])
    config = from_config_dict(recipe)
    task = dataclasses.replace(config.task, unseen_problems=0)
    evaluation = dataclasses.replace(config.evaluation, every_steps=10**6)
    sampler = config.sampler
    if arguments.quick:
        task = dataclasses.replace(task, heldout_problems=16)
        sampler = dataclasses.replace(sampler, prompts_per_step=8, group_size=4)
    return dataclasses.replace(
        config,
        experiment="algorithms",
        seed=seed,
        steps=arguments.steps,
        task=task,
        sampler=sampler,
        evaluation=evaluation,
        run=dataclasses.replace(config.run, root=str(arguments.root)),
    )


def main() -> int:
    arguments = _arguments()
    path = arguments.out / "algorithms.json"
    found = json.loads(path.read_text()) if path.is_file() else {"steps": arguments.steps}
    if found["steps"] != arguments.steps:
        sys.exit(f"{path} has runs of {found['steps']} steps: name another --out, or as many")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            of_arm = found.setdefault("arms", {}).setdefault(arm, {"fields": ARMS[arm], "runs": {}})
            if of_arm["fields"] != ARMS[arm]:
                sys.exit(f"{path}: {arm} was run with {of_arm['fields']}: name another --out")
            if str(seed) not in of_arm["runs"]:
                summary = run(config_of(arm, seed, arguments))
                if not summary["finished"]:  # Ctrl-C
                    return 130
                of_arm["runs"][str(seed)] = {name: summary[name] for name in FIGURES}
                write_atomic(path, to_json(found, indent=1) + "\n")
                jax.clear_caches()  # hardly two arms have a program in common
    heads = ("arm", "trained", "held out, median", "by seed", "mean reward", "largest gap")
    rows = rows_of(found)
    table(Console(width=120), f"after {found['steps']} steps", heads, rows)
    lines = [heads, ("---",) * len(heads), *rows]
    written = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    write_atomic(path.with_suffix(".md"), f"After {found['steps']} steps:\n\n{written}")
    return 0


def rows_of(found: dict) -> list[tuple[str, ...]]:
    """A row an arm."""
    rows = []
    for arm, of_arm in found["arms"].items():
        runs = list(of_arm["runs"].values())
        passed = [one["heldout_pass_after"] for one in runs]
        rows.append(
            (
                arm,
                f"{runs[0]['adapter_bytes'] // 4:,}",
                f"{statistics.median(passed):.1%}",
                ", ".join(f"{value:.1%}" for value in passed),
                f"{statistics.median(one['reward_mean'] for one in runs):.3f}",
                f"{max(one['parity_max_abs_diff'] for one in runs):g}",
            )
        )
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arms = {"nargs": "+", "choices": ARMS, "default": list(ARMS), "metavar": "ARM"}
    parser.add_argument("--arms", help=f"of {', '.join(ARMS)}", **arms)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--quick", action="store_true", help="few and small rollouts")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="of the run folders")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="of algorithms.json")
    arguments = parser.parse_args()
    if arguments.steps < 1 or min(arguments.seeds) < 0:
        parser.error("--steps must be at least 1, --seeds at least 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
