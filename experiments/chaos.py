"""A run that meets thirty hazards must end as one that nobody disturbed, bit for bit.

    python experiments/chaos.py --out runs/chaos --config.steps=40
    python experiments/chaos.py --out runs/chaos_tools --config configs/tiny_tools.py
    python experiments/chaos.py --out runs/chaos_short --config configs/tiny_moe.py:test --hazards 5

One run goes undisturbed; another, of the same config, meets a hazard at random moments and is
started again each time: SIGKILL, SIGTERM, a full disk, a kill after which the newest checkpoint or
the file of metrics is cut short. Every fifth strikes while the run starts. In the end metrics (all
but times), samples and the last checkpoint of both are compared, bit by bit. Writes `chaos.json`
with every hazard, the steps it cost and the seconds to the next step; status 1 if anything differs.

The disturbed run has a small file system of its own, in memory, which a hazard fills up; that takes
Linux and its user namespaces.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from orbit_jax.checkpoint import run_state
from orbit_jax.config import Config, to_dict
from orbit_jax.runs.cli import main
from orbit_jax.runs.files import require_folder, to_json, write_atomic
from orbit_jax.runs.folder import RunFolder, require_new
from orbit_jax.runs.metrics import read_metrics
from orbit_jax.runs.printing import table
from orbit_jax.runs.sweeps import script_of

FLAGS = flags.FLAGS
HAZARDS = ("SIGKILL", "SIGTERM", "full disk", "cut checkpoint", "cut metrics")
OF_THE_MACHINE = ("seconds/", "tokens_per_second", "hardware/")  # metrics that are not compared
LONGEST = 900.0  # seconds that a step, or an end, is waited for
ROOM = 4  # of the disturbed run, times the bytes of the undisturbed
READY = re.compile(r"ready after ([\d.]+) s of compiling")


def define_flags() -> None:
    """Those beside --config."""
    flags.DEFINE_string("out", "", "a new folder, for both runs and chaos.json")
    flags.DEFINE_integer("hazards", 30, "how many", lower_bound=1)
    flags.DEFINE_integer("chaos_seed", 0, "of the hazards and their moments")
    flags.DEFINE_bool("mounted", False, "set by this script itself, in a namespace of its own")


def run(config: Config) -> None:
    """Both runs, and what came of them."""
    out = Path(FLAGS.out).absolute()
    if not FLAGS.mounted:
        require_new(out, "out")
        require_folder("out", FLAGS.out)
        own = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, *sys.argv]
        sys.exit(subprocess.run([*own, "--mounted"]).returncode)
    undisturbed, disturbed = RunFolder(out / "undisturbed"), RunFolder(out / "disturbed/run")
    began = time.monotonic()
    await_end(start(config, undisturbed))
    seconds = {"undisturbed": time.monotonic() - began}
    size = ROOM * sum(f.stat().st_size for f in undisturbed.path.rglob("*") if f.is_file())
    disk = disturbed.path.parent
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    began = time.monotonic()
    hazards = disturb(config, disturbed)
    seconds["disturbed"] = time.monotonic() - began
    same = compare(undisturbed, disturbed)
    shutil.copytree(disk, out / "after")  # what is mounted here ends with this process
    figures = {name: getattr(config, name) for name in ("experiment", "steps")}
    figures |= {"checkpoint_every_steps": config.run.checkpoint_every_steps, "seconds": seconds}
    write_atomic(
        out / "chaos.json", to_json(figures | {"same": same, "hazards": hazards}, indent=1) + "\n"
    )
    show(same, hazards, seconds)
    sys.exit(int(not all(same.values())))


def start(config: Config, folder: RunFolder) -> subprocess.Popen:
    """The experiment's process: it begins the run of the folder, or goes on with it."""
    if not (folder.path / "config.json").is_file():
        folder.prepare(to_dict(config))
    overrides = config_flags.get_override_values(FLAGS["config"])
    command = [
        sys.executable,
        script_of(config.experiment, Path(__file__).parent),
        f"--config={config_flags.get_config_filename(FLAGS['config'])}",
        *(f"--config.{field}={value}" for field, value in overrides.items()),
        f"--resume={folder.path}",
    ]
    with Path(FLAGS.out, "output.txt").open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def disturb(config: Config, folder: RunFolder) -> list[dict[str, Any]]:
    """Lets a run meet all hazards, then end in peace; what happened at each."""
    chance = random.Random(FLAGS.chaos_seed)
    kinds = [HAZARDS[i % len(HAZARDS)] for i in range(FLAGS.hazards)]
    chance.shuffle(kinds)
    moments = sorted(chance.uniform(0, config.steps - 1) for _ in kinds)
    met: list[dict[str, Any]] = []
    start_seconds = 20.0
    for i, (kind, moment) in enumerate(zip(kinds, moments, strict=True)):
        earlier, born = len(ready(folder)), time.monotonic()
        child = start(config, folder)
        if while_starting := i % 5 == 4:
            time.sleep(chance.uniform(0, start_seconds))
        else:
            resumed_after = await_first_step(child, folder, earlier)
            start_seconds = time.monotonic() - born
            if met:
                met[-1] |= {"resumed_after": resumed_after, "seconds_to_next_step": start_seconds}
                met[-1] |= {"seconds_of_them_compiling": ready(folder)[-1]}
            await_true(child, lambda at=moment: steps_done(folder) >= int(at))
            time.sleep(moment % 1 * read_metrics(folder.path)[-1].get("seconds/step", 1.0))
        met.append({"hazard": kind, "while_starting": while_starting})
        met[-1] |= strike(kind, child, folder, chance)
        when = "while it starts" if while_starting else f"after step {met[-1]['step']}"
        print(f"{i + 1}/{len(kinds)} {kind}, {when}", flush=True)
    await_end(start(config, folder))
    return met


def strike(
    kind: str, child: subprocess.Popen, folder: RunFolder, chance: random.Random
) -> dict[str, Any]:
    """Does it, and waits until the process has ended."""
    if kind == "full disk":
        filler = folder.path.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
        await_end(child)
        filler.unlink()
    else:
        child.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        await_end(child)
    step, cut, least, metrics = steps_done(folder), None, 0, folder.path / "metrics.jsonl"
    if kind == "cut checkpoint" and (newest := run_state.latest(folder.checkpoints).path):
        cut = chance.choice(
            sorted(f for f in newest.rglob("*") if f.is_file() and f.stat().st_size)
        )
    elif kind == "cut metrics" and len(read_metrics(folder.path)) > 2:
        cut, least = metrics, sum(map(len, metrics.read_bytes().splitlines(keepends=True)[:-2]))
    if cut:
        os.truncate(cut, chance.randrange(least, cut.stat().st_size))
    cut_file = cut and str(cut.relative_to(folder.path))
    return {"step": step, "status": child.returncode, "cut": cut_file}


def await_first_step(child: subprocess.Popen, folder: RunFolder, earlier: int) -> int:
    """Waits for the first step of a process; how many were done before it."""
    await_true(child, lambda: len(ready(folder)) > earlier)
    before = steps_done(folder)
    await_true(child, lambda: steps_done(folder) > before)
    return before


def await_true(child: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Waits for something that a run does; one that had no step left ends without it."""
    limit = time.monotonic() + LONGEST
    while not condition() and child.poll() != 0:
        if child.poll() is not None or time.monotonic() > limit:
            child.kill()
            sys.exit(f"the run has ended by itself, or hung: see output.txt in {FLAGS.out}")
        time.sleep(0.02)


def await_end(child: subprocess.Popen) -> None:
    """Waits until a process has ended."""
    try:
        child.wait(LONGEST)
    except subprocess.TimeoutExpired:
        child.kill()
        sys.exit(f"the run has not ended within {LONGEST:g} s: see output.txt in {FLAGS.out}")


def steps_done(folder: RunFolder) -> int:
    """By the file of metrics."""
    rows = read_metrics(folder.path)
    return rows[-1]["step"] if rows else 0


def ready(folder: RunFolder) -> list[float]:
    """Of each process that has come to its steps the seconds that it compiled and compared."""
    log = folder.path / "log.txt"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [float(seconds) for seconds in READY.findall(text)]


def compare(one: RunFolder, other: RunFolder) -> dict[str, bool]:
    """Whether two runs left the same, but for times."""

    def rows(folder: RunFolder) -> list[dict[str, Any]]:
        found = read_metrics(folder.path)
        return [{k: v for k, v in r.items() if not k.startswith(OF_THE_MACHINE)} for r in found]

    def samples(folder: RunFolder) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.samples.iterdir()}

    def state(folder: RunFolder) -> dict[str, tuple]:
        arrays = run_state.stored_arrays(run_state.latest(folder.checkpoints).path)
        return {n: (str(x.dtype), x.shape, x.tobytes()) for n, x in arrays.items()}

    steps = [row["step"] for row in rows(other)]
    return {
        "each step once": steps == [row["step"] for row in rows(one)],
        "metrics": rows(one) == rows(other),
        "samples": samples(one) == samples(other),
        "state": state(one) == state(other),
    }


def show(same: dict[str, bool], hazards: list[dict[str, Any]], seconds: dict[str, float]) -> None:
    """A row for each kind of hazard, then what is the same."""
    rows = []
    for kind in HAZARDS:
        of_kind = [one for one in hazards if one["hazard"] == kind]
        known = [one for one in of_kind if "resumed_after" in one]
        lost = [one["step"] - one["resumed_after"] for one in known]
        to_next = [one["seconds_to_next_step"] for one in known]
        middle = f"{statistics.median(to_next):.1f}" if to_next else "-"
        rows.append((kind, f"{len(of_kind)}", f"{sum(lost)}", middle))
    heads = ("hazard", "times", "steps done again", "seconds to the next step, median")
    console = Console(width=100)
    table(console, "what the disturbed run met", heads, rows)
    for name, value in same.items():
        console.print(f"{name}: {'equal' if value else 'DIFFERENT'}", highlight=False)
    calm, disturbed = seconds["undisturbed"], seconds["disturbed"]
    console.print(f"{calm:.0f} s undisturbed, {disturbed:.0f} s disturbed", highlight=False)


if __name__ == "__main__":
    define_flags()
    main(run, default_config="configs/tiny_moe.py", resumable=False)
