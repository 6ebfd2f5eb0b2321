"""Overlays finished runs: one picture of their curves, one table with a row per arm and seed.

python experiments/curves.py --out experiments/reports/tiny_moe runs/ppo_math-… runs/ppo_math-…
"""

import argparse
import json
from pathlib import Path

from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.plots import learning_curve

EVALUATIONS = ("heldout/pass_greedy", "heldout/pass_sampled")
EVALUATIONS += ("unseen/pass_greedy", "unseen/pass_sampled")


def row(folder: Path) -> dict:
    """What a table says of one run: evaluation before and after, gap, cost."""
    summary = json.loads((folder / "summary.json").read_text())
    if not summary["finished"]:
        raise SystemExit(f"{folder} is not finished: resume it first, or leave it out")
    evaluated = [r for r in read_metrics(folder) if EVALUATIONS[-1] in r] or read_metrics(folder)
    config = summary["config"]
    mesh = config["mesh"]
    return {
        "arm": config["ppo"]["advantage"],
        "mesh": f"{mesh['data']}x{mesh['tensor']}",
        "seed": summary["seed"],
        "steps": summary["steps"],
        **{f"{name} before": evaluated[0].get(name) for name in EVALUATIONS},
        **{f"{name} after": evaluated[-1].get(name) for name in EVALUATIONS},
        "parity_max_abs_diff": summary["parity_max_abs_diff"],
        "parity_tokens": summary["parity_tokens"],
        "seconds": round(summary["seconds"], 1),
        "tokens_per_second": round(summary["tokens_per_second"]),
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    rows = [row(folder) for folder in args.runs]
    labels = [f"{r['arm']}, mesh {r['mesh']}, seed {r['seed']}" for r in rows]
    if len(set(labels)) < len(labels):
        labels = [f"{label}, {f.name}" for label, f in zip(labels, args.runs, strict=True)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    curves = {name: read_metrics(f) for name, f in zip(labels, args.runs, strict=True)}
    learning_curve(curves, args.out.with_suffix(".png"))
    for label, r in zip(labels, rows, strict=True):
        rates = ", ".join(
            f"{name} {r[f'{name} before']:.1%} -> {r[f'{name} after']:.1%}"
            for name in EVALUATIONS
            if r[f"{name} after"] is not None
        )
        print(f"{label}: {rates}; gap {r['parity_max_abs_diff']:g}; {r['seconds']:.0f} s")


if __name__ == "__main__":
    main()
