"""One batch again, alone: a run's step on a batch that it kept because something was wrong with it.

    python experiments/replay.py runs/ppo_math-.../replays/step_000012
    python experiments/replay.py runs/ppo_math-.../replays/step_000012 --parity tiles

A run keeps a batch whose log-probs differ or whose gradient is not finite, beside the state that it
met. Here the same programs take the same step again, and nothing is written. Printed are metrics of
the step, and the tokens whose log-probs by trainer and by sampler are furthest apart.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from orbit_jax import compile as compiler
from orbit_jax import parity, startup, trained
from orbit_jax.checkpoint import run_state
from orbit_jax.rl import advantages, losses
from orbit_jax.rl.batch import Batch, load_batch
from orbit_jax.rl.objective import forward
from orbit_jax.runs.printing import table

SHOWN = ("parity/", "update/", "gradient_norm/", "loss/", "ratio/", "reward/")
WORST_TOKENS = 8


def replay(path: Path, recipe: str) -> tuple[str, dict[str, float], Batch, np.ndarray]:
    """What was wrong, the step's metrics, the batch, and the trainer's log-probs [M, N]."""
    config = trained.config_of(path.parent.parent)
    startup.set_up_jax(config)
    frozen = startup.load(config)
    state, facts = run_state.restore(path, startup.train_state(config, frozen))
    recipe = recipe or facts["recipe"]
    programs = parity.build(recipe, frozen.model, config)
    batch = load_batch(path / "batch.npz", programs.model)
    own_logprobs = compiler.jit(forward, compiler.options(recipe), static_argnames=("config",))
    own = [
        own_logprobs(
            programs.step,
            frozen.base,
            state.policy,
            jax.tree.map(lambda x, i=i: x[i], batch.stream),
            batch.scored[i],
            temperature=batch.temperature,
        )[0]
        for i in range(len(batch.scored))
    ]
    named = losses.named(config.ppo.loss), advantages.named(config.ppo.advantage)
    _, metrics = programs.ppo_step(programs.step, frozen.base, state, batch, *named)
    return facts["trouble"], jax.device_get(metrics), batch, np.asarray(own)


def furthest(batch: Batch, own: np.ndarray) -> list[tuple[str, ...]]:
    """Rows of the tokens where the two log-probs are furthest apart, NaN before all."""
    gap = np.where(batch.sampled, np.abs(own - np.asarray(batch.logprobs)), 0)
    order = np.argsort(-np.nan_to_num(gap, nan=np.inf), axis=None)[:WORST_TOKENS]
    rows = []
    for micro, place in zip(*np.unravel_index(order, gap.shape), strict=True):
        at = micro, place
        row = micro * batch.stream.num_rows + batch.stream.rows[at]
        where = (f"{row}", f"{batch.stream.positions[at]}", f"{batch.stream.tokens[at]}")
        rows.append((*where, f"{batch.logprobs[at]:.9g}", f"{own[at]:.9g}", f"{gap[at]:.3g}"))
    return rows


def main() -> int:
    arguments = _arguments()
    try:
        trouble, metrics, batch, own = replay(arguments.path.absolute(), arguments.parity)
    except ValueError as error:
        sys.exit(f"error: {error}")
    console = Console(width=110)
    console.print(f"then: {trouble}", highlight=False)
    shown = {n: v for n, v in sorted(metrics.items()) if n.startswith(SHOWN)}
    table(console, "now", ("metric", "value"), [(n, f"{float(v):.6g}") for n, v in shown.items()])
    heads = ("row", "position", "token", "sampler", "trainer", "gap")
    table(console, "log-probs that are furthest apart", heads, furthest(batch, own))
    return int(not metrics["update/applied"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="replays/step_... of a run folder")
    recipes = ("", *parity.RECIPES)
    parser.add_argument("--parity", choices=recipes, default="", help="default: that of the run")
    arguments = parser.parse_args()
    if not (arguments.path / "batch.npz").is_file():
        parser.error(f"{arguments.path} has no batch.npz: name a folder under a run's replays/")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
