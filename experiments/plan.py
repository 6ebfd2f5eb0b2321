"""Plans a run before any weight is loaded: memory, time and traffic, from the compiled programs.

    python experiments/plan.py --config configs/kimi_k2.py --device b200
    python experiments/plan.py --config configs/kimi_k2.py --device b200 --compare --price 4
    python experiments/plan.py --config configs/tiny_moe.py --device h100 --estimate

The run's own sampler and step are compiled for the devices from shapes alone. `make plan` installs
the compiler for GPUs, which needs none; without it the programs are compiled for the CPU. Prints
tables; writes `plan.json` and `plan.png` to --out. Ends with status 1 if the run does not fit.

Times are a roofline at stated shares of the device's published rates, not a measurement.
"""

import json
import sys
from pathlib import Path

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from orbit_jax import startup
from orbit_jax.config import Config
from orbit_jax.plan import compiler, picture
from orbit_jax.plan.adapter_only import adapter_only
from orbit_jax.plan.devices import find
from orbit_jax.plan.full_parameters import PRECISIONS, full_parameters
from orbit_jax.plan.plan import Plan, check_count, make_plan
from orbit_jax.plan.programs import arguments
from orbit_jax.plan.recommendation import recommendation
from orbit_jax.plan.search import Setting, largest
from orbit_jax.plan.times import Times
from orbit_jax.plan.workload import Workload
from orbit_jax.rl.train_state import trained_parameters
from orbit_jax.runs.cli import main

FLAGS = flags.FLAGS
flags.DEFINE_string("device", "b200", "kind of device: h100, h200, b200 or b300")
flags.DEFINE_integer("count", 0, "devices; by default those of the config's mesh")
flags.DEFINE_string("out", "runs/plan", "folder for plan.json and plan.png")
flags.DEFINE_bool("estimate", False, "the closed form alone, without compiling: a few seconds")
flags.DEFINE_bool("compare", False, "set training of all parameters beside it")
flags.DEFINE_float("price", 4.0, "of a device hour, in any currency, for --compare")
flags.DEFINE_float("disk", 5e9, "bytes per second that a checkpoint is read at")


def run(config: Config) -> int:
    """Prints the plan and writes it; 1 if the run does not fit, else 0."""
    device = find(FLAGS.device)
    check_count(config, FLAGS.count)
    compiler.set_up(config.mesh.size)
    console = Console(width=100)
    given = arguments(config, compiler.devices_of(device, config.mesh.size))
    if not FLAGS.estimate:
        console.print("compiling the sampler and the step; of a large model that takes minutes ...")
    plan = make_plan(config, device, given, compile_them=not FLAGS.estimate)

    def trained(changed: Config) -> int:
        make = lambda: startup.initial_state(changed, given.model, given.base)  # noqa: E731
        return trained_parameters(jax.eval_shape(make))

    settings = largest(plan, given.model, trained)
    times = plan.times(FLAGS.disk) if plan.programs else None
    show(plan, settings, times, console)
    found = plan.to_json() | {"largest": {one.name: one.best for one in settings}}
    found["largest_batch"] = settings[0].best * config.sampler.group_size
    if times:
        found["seconds"] = times.to_json()
    if FLAGS.compare:
        found["compared"] = compare(plan, console)
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(found, indent=2) + "\n")
    picture.draw(plan, out / "plan.png")
    console.print(f"wrote {out / 'plan.json'} and {out / 'plan.png'}")
    return 0 if plan.fits else 1


def show(plan: Plan, settings: tuple[Setting, ...], times: Times | None, console: Console) -> None:
    """Prints memory, limits, traffic and times."""
    device, model = plan.device, plan.model
    console.print(
        f"{model.name}: {model.parameters / 1e9:,.1f} G parameters, {plan.trained / 1e6:,.0f} M "
        f"trained ({plan.trained / model.parameters:.3%}), on {plan.count} x {device.name} of "
        f"{device.memory_bytes / 1e9:.1f} GB; figures by {plan.source}",
        highlight=False,
    )
    rows = [(name, gigabytes(size)) for name, size in plan.parts.items() if size]
    table(console, "held by each device, GB", ("part", "bytes"), rows)
    guesses = {"sample": plan.guess.sample, "ppo_step": plan.guess.ppo_step}
    rows = [
        (
            name,
            gigabytes(program.arguments),
            gigabytes(program.temporaries),
            gigabytes(guesses[name]),
            gigabytes(program.resident),
            gigabytes(program.total),
            f"{program.total / device.memory_bytes:.1%}",
            f"{plan.compile_seconds[name]:.0f} s",
        )
        for name, program in plan.programs.items()
    ]
    heads = "program,arguments,temporaries,by estimate,held besides,in all,of device,compiled in"
    if rows:
        table(console, "while a program runs, GB of each device", heads.split(","), rows)
    else:
        console.print(f"by estimate, at the widest: {gigabytes(plan.needed)} GB of each device")
    for name, copies in plan.copies.items():
        for copy in copies:
            console.print(f"{name} makes {copy.shape} ({copy.opcode}) as large as a weight stack")
    rows = [(one.name, f"{one.now:,}", f"{one.best:,}") for one in settings]
    heads = ("setting", "now", "largest that fits, others as they are")
    table(console, "limits by the closed form", heads, rows)
    if times:
        show_times(plan, times, console)
    verdict = "fits" if plan.fits else "does NOT fit: change one of the settings above"
    console.print(
        f"{gigabytes(plan.needed)} GB of each device, {plan.node_fraction:.1%} of its memory "
        f"({gigabytes(plan.room)} may be planned): {verdict}"
    )


def show_times(plan: Plan, times: Times, console: Console) -> None:
    """What a step sends and takes."""
    rows = [
        (
            purpose,
            gigabytes(plan.sent["sample"][purpose]),
            gigabytes(plan.sent["ppo_step"][purpose]),
            f"{times.sample_links[purpose] + times.step_links[purpose]:.2f}",
            f"{times.share(purpose):.2%}",
        )
        for purpose in plan.sent["ppo_step"]
    ]
    heads = ("sent for", "sampling, GB", "step, GB", "seconds", "of the step")
    table(console, "sent by each device in a step, counted in the programs", heads, rows)
    rows = [(name, f"{value:,.1f}") for name, value in times.to_json().items()]
    table(console, "seconds, by a roofline", ("part", "seconds"), rows)


def compare(plan: Plan, console: Console) -> dict:
    """Training of all parameters beside this run, by closed forms."""
    sampler = plan.config.sampler
    workload = Workload(
        rows=plan.config.rows,
        tokens_per_row=sampler.max_prompt_tokens + sampler.max_completion_tokens,
        rows_at_once=plan.config.decoded_rows,
    )
    ours = adapter_only(plan.model, plan.device, workload, plan.config.adapter.rank)
    others = [full_parameters(plan.model, plan.device, workload, one) for one in PRECISIONS]
    rows = [
        (
            one.precision.name,
            f"{one.nodes:,}",
            gigabytes(one.state_bytes + one.rollout_bytes),
            f"{one.times.step:,.0f}",
            f"{one.times.share():.1%}",
        )
        for one in others
    ]
    heads = ("all parameters", "nodes", "GB in all", "step, seconds", "communication")
    table(console, "training all parameters of the same model", heads, rows)
    text = recommendation(plan.model, plan.device, workload, ours, others, FLAGS.price)
    console.print(text, highlight=False)
    return {
        "adapters": ours.to_json(),
        "all_parameters": [one.to_json() for one in others],
        "recommendation": text,
    }


def table(console: Console, title: str, heads: tuple[str, ...], rows: list[tuple]) -> None:
    """Prints rows, the first column to the left, numbers to the right."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        shown.add_column(head, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    console.print()
    console.print(title, style="bold")
    console.print(shown)


def gigabytes(size: float) -> str:
    """In powers of 1,000, without the unit."""
    return f"{size / 1e9:,.2f}"


if __name__ == "__main__":
    main(lambda config: sys.exit(run(config)), "configs/kimi_k2.py", resumable=False)
