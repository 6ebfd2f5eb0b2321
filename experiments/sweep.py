"""A grid of settings times seeds, run one after another: what changes with a field, and how surely.

    python experiments/sweep.py --config configs/tiny_moe.py --seeds 0,1,2 --out runs/sweep_lr \\
        --grid optimizer.learning_rate=1e-4,5e-4,2e-3 --grid adapter.rank=4,16
    python experiments/sweep.py --config configs/tiny_tools.py:code --out runs/code_seeds
    python experiments/sweep.py --config configs/tiny_moe.py --run my_ppo.py --out runs/mine
    python experiments/sweep.py --show runs/sweep_lr --measures gain,entropy

Each cell is a run folder of its own beneath --out, as `learning_rate=0.0005,rank=4/seed=0`, made by
the experiment's own command, which is printed. All are checked before the first one starts; every
setting has its first seed before any has its second. The same command goes on with a sweep that was
stopped, tries again what failed, and adds what the grid has gained. Writes `sweep.json` and
`sweep.png`; prints medians, means and Student's intervals of 95% over seeds. Status 1 if a run
failed.
"""

import datetime
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from orbit_jax.config import Config
from orbit_jax.runs.children import Children
from orbit_jax.runs.cli import main
from orbit_jax.runs.files import require_folder
from orbit_jax.runs.folder import RunFolder
from orbit_jax.runs.grid import Cell, read_grid, read_seeds
from orbit_jax.runs.sweep_plot import draw
from orbit_jax.runs.sweep_report import show
from orbit_jax.runs.sweeps import MEASURES, Sweep, require_measures, script_of

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Those beside --config."""
    flags.DEFINE_multi_string("grid", [], "a field and its values, as adapter.rank=4,16")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "of every setting")
    flags.DEFINE_string("out", "", "the sweep's folder, a new one or that of one to go on with")
    flags.DEFINE_string("run", "", "the experiment, its path or name; else config.experiment")
    flags.DEFINE_list("measures", list(MEASURES), "figures of summary.json, gain, or metrics")
    flags.DEFINE_string("show", "", "instead: the folder of a sweep, whose table is printed")


def run(config: Config) -> None:
    """What the command line asks for."""
    require_measures(FLAGS.measures)
    if FLAGS.show:
        show(Sweep.read(FLAGS.show), FLAGS.measures)
        return
    script = script_of(FLAGS.run or config.experiment, Path(__file__).parent)
    grid, seeds = read_grid(FLAGS.grid, config), read_seeds(FLAGS.seeds)
    sweep = Sweep.plan(FLAGS.out, script, config, grid, seeds)
    require_folder("out", FLAGS.out)
    with RunFolder(sweep.folder).lock() as lock, Children(keep=lock) as children:
        run_all(sweep, children, command, FLAGS.measures)
    if any(cell.figures for cell in sweep.cells):
        draw(sweep, FLAGS.measures, sweep.folder / "sweep.png")
    show(sweep, FLAGS.measures)
    states = {sweep.state(cell) for cell in sweep.asked}
    if children.stop and states != {"finished"}:
        print(f"stopped; go on with:\n  {shlex.join([sys.executable, *sys.argv])}")
        sys.exit(130)
    sys.exit(int("failed" in states))


def run_all(
    sweep: Sweep,
    children: Children,
    command: Callable[[Sweep, Cell], list[str]],
    measures: Sequence[str],
) -> None:
    """Runs every cell that has not finished, and writes down how each ended."""
    finished = [cell for cell in sweep.asked if cell.figures]
    todo = [cell for cell in sweep.asked if not cell.figures]
    print(f"{len(todo)} runs to do; {len(finished)} of {len(sweep.asked)} have finished")
    earlier = [cell.figures["seconds"] for cell in finished if "seconds" in cell.figures]
    seconds: list[float] = []
    for i, cell in enumerate(todo):
        line = [f"\n[{i + 1}/{len(todo)}] {cell.name}"]
        if seconds or earlier:
            left = statistics.fmean(seconds or earlier) * (len(todo) - i)
            line.append(f"ETA {datetime.timedelta(seconds=round(left))}")
        again = {"failed": f"once more, after {cell.error}", "unfinished": "goes on"}
        print("  ".join([*line, again.get(sweep.state(cell), "")]).rstrip())
        cell.error = ""
        sweep.write(measures)
        began = time.monotonic()
        run_cell(sweep, cell, children, command)
        if cell.figures:
            seconds.append(time.monotonic() - began)
        elif cell.error:
            print(f"failed: {cell.error}", file=sys.stderr)
        if children.stop:
            break
    sweep.write(measures)


def run_cell(
    sweep: Sweep, cell: Cell, children: Children, command: Callable[[Sweep, Cell], list[str]]
) -> None:
    """Runs one cell, which has failed if it ends before its last step and nobody stopped it."""
    sweep.prepare(cell)
    line = command(sweep, cell)
    print(f"  {shlex.join(line)}", flush=True)
    error = children.run(line, sweep.path(cell) / "errors.txt")
    sweep.refresh(cell)
    if not cell.figures:
        cell.error = "" if children.stop else error or "it was stopped by itself"


def command(sweep: Sweep, cell: Cell) -> list[str]:
    """What one would type to run the cell, in its folder."""
    overrides = config_flags.get_override_values(FLAGS["config"])
    overrides = overrides | cell.settings | {"seed": cell.seed}
    return [
        sys.executable,
        sweep.script,
        f"--config={config_flags.get_config_filename(FLAGS['config'])}",
        *(f"--config.{field}={text(value)}" for field, value in overrides.items()),
        f"--resume={sweep.path(cell)}",
    ]


def text(value: Any) -> str:
    """A value as the command line takes it, the number of a field of either kind of number."""
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else repr(int(value) if whole else value)


if __name__ == "__main__":
    define_flags()
    main(run, default_config="configs/tiny_moe.py", resumable=False)
