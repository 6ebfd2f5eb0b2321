"""Plans a run before any weight is loaded: memory, time and traffic, from the compiled programs.

    python experiments/plan.py --config configs/kimi_k2.py --device b200
    python experiments/plan.py --config configs/kimi_k2.py --device b200 --compare --price 4
    python experiments/plan.py --config configs/tiny_moe.py --device h100 --estimate
    python experiments/plan.py --sizes 7b,70b,1t,1.6t,50t --device b200

The run's own sampler and step are compiled for the devices from shapes alone. `make plan` installs
the compiler for GPUs, which needs none; without it the programs are compiled for the CPU. Prints
tables; writes `plan.json` and `plan.png` to --out. Ends with status 1 if the run does not fit.

`--compare` sets training of all parameters beside it. `--sizes` does so for models of assumed
shapes with LoRA of `config.adapter.rank` on all linear weights, and writes `plan_sizes.json`.

Times are a roofline at stated shares of the device's published rates, not a measurement.
"""

import json
import sys
from pathlib import Path

import jax
from absl import flags
from rich.console import Console

from orbit_jax import startup
from orbit_jax.config import Config
from orbit_jax.model.config import MeshShape
from orbit_jax.plan import comparison, compiler, picture
from orbit_jax.plan.adapter_only import lora_parameters
from orbit_jax.plan.counts import preset
from orbit_jax.plan.devices import Device, find
from orbit_jax.plan.plan import Plan, check_count, make_plan, require_positive
from orbit_jax.plan.programs import arguments
from orbit_jax.plan.search import Setting, largest
from orbit_jax.plan.times import Times
from orbit_jax.rl.train_state import trained_parameters
from orbit_jax.runs.cli import main
from orbit_jax.runs.files import require_folder
from orbit_jax.runs.printing import quantity, size, table

WIDTH = 100
FLAGS = flags.FLAGS
flags.DEFINE_string("device", "b200", "kind of device: h100, h200, b200 or b300")
flags.DEFINE_integer("count", 0, "devices; by default those of the config's mesh")
flags.DEFINE_string("out", "runs/plan", "folder for plan.json and plan.png")
flags.DEFINE_bool("estimate", False, "the closed form alone, without compiling: a few seconds")
flags.DEFINE_bool("compare", False, "set training of all parameters beside it")
flags.DEFINE_list("sizes", [], "instead of a run: compare for such of 7b, 70b, 1t, 1.6t and 50t")
flags.DEFINE_float("price", 4.0, "of a device hour, in any currency, for --compare")
flags.DEFINE_float("disk", 5e9, "bytes per second that a checkpoint is read at")


def run(config: Config) -> int:
    """Prints the plan and writes it; 1 if the run does not fit, else 0."""
    device = find(FLAGS.device)
    require_positive("price", FLAGS.price)
    require_positive("disk", FLAGS.disk)
    require_folder("out", FLAGS.out)
    if FLAGS.sizes:
        return compare_sizes(config, device)
    check_count(config, FLAGS.count)
    compiler.set_up(config.mesh.size)
    console = Console(width=WIDTH)
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
        compared = comparison.compare(
            plan.model,
            device,
            comparison.workload_of(config),
            plan.trained_in_all,
            plan.reduced,
            given.model.mesh,
        )
        comparison.show(compared, FLAGS.price, console)
        advice = {"recommendation": compared.recommendation(FLAGS.price)}
        found["compared"] = compared.to_json() | advice
    written = write("plan.json", found)
    picture.draw(plan, written.with_suffix(".png"))
    console.print(f"wrote {written} and {written.with_suffix('.png')}")
    return 0 if plan.fits else 1


def compare_sizes(config: Config, device: Device) -> int:
    """Both ways for assumed shapes; mesh, steps and the rank on all weights are the config's."""
    workload, mesh = comparison.workload_of(config), MeshShape(config.mesh.data, config.mesh.tensor)
    found = []
    for model in map(preset, FLAGS.sizes):
        trained = lora_parameters(model, config.adapter.rank)
        found.append(comparison.compare(model, device, workload, *trained, mesh))
    console = Console(width=WIDTH)
    comparison.show_sizes(found, console)
    written = write("plan_sizes.json", {one.model.name: one.to_json() for one in found})
    console.print(f"wrote {written}")
    return 0


def write(name: str, found: dict) -> Path:
    """Into the folder --out; the path."""
    path = Path(FLAGS.out) / name
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path


def show(plan: Plan, settings: tuple[Setting, ...], times: Times | None, console: Console) -> None:
    """Prints memory, limits, traffic and times."""
    device, model = plan.device, plan.model
    console.print(
        f"{model.name}: {quantity(model.parameters)} parameters, {quantity(plan.trained)} trained "
        f"({plan.trained / model.parameters:.3%}), on {plan.count} x {device.name} of "
        f"{size(device.memory_bytes)}; figures by {plan.source}",
        highlight=False,
    )
    rows = [(name, size(held)) for name, held in plan.parts.items() if held]
    table(console, "held by each device", ("part", "bytes"), rows)
    guesses = {"sample": plan.guess.sample, "ppo_step": plan.guess.ppo_step}
    rows = [
        (
            name,
            size(program.arguments),
            size(program.temporaries),
            size(guesses[name]),
            size(program.resident),
            size(program.total),
            f"{program.total / device.memory_bytes:.1%}",
            f"{plan.compile_seconds[name]:.0f} s",
        )
        for name, program in plan.programs.items()
    ]
    heads = "program,arguments,temporaries,by estimate,held besides,in all,of device,compiled in"
    if rows:
        table(console, "while a program runs, of each device", heads.split(","), rows)
    else:
        console.print(f"by estimate, at the widest: {size(plan.needed)} of each device")
    for name, copies in plan.copies.items():
        for copy in copies:
            console.print(f"{name} makes {copy.shape} ({copy.opcode}) as large as a weight stack")
    rows = [(one.name, f"{one.now:,}", f"{one.best:,}") for one in settings]
    heads = ("setting", "now", "largest that fits, others as they are")
    table(console, "limits by the closed form", heads, rows)
    if times:
        show_times(plan, times, console)
    verdict = "fits" if plan.fits else "does NOT fit: change one of the settings above"
    if plan.parts["base"] > plan.room:
        verdict = "does NOT fit: the base alone is too large; take more devices, or larger ones"
    console.print(
        f"{size(plan.needed)} of each device, {plan.node_fraction:.1%} of its memory "
        f"({size(plan.room)} may be planned): {verdict}"
    )


def show_times(plan: Plan, times: Times, console: Console) -> None:
    """What a step sends and takes."""
    rows = [
        (
            purpose,
            size(plan.sent["sample"][purpose]),
            size(plan.sent["ppo_step"][purpose]),
            f"{times.sample_links[purpose] + times.step_links[purpose]:.2f}",
            f"{times.share(purpose):.2%}",
        )
        for purpose in plan.sent["ppo_step"]
    ]
    heads = ("sent for", "sampling", "step", "seconds", "of the step")
    table(console, "sent by each device in a step, counted in the programs", heads, rows)
    rows = [(name, f"{value:,.1f}") for name, value in times.to_json().items()]
    table(console, "seconds, by a roofline", ("part", "seconds"), rows)


if __name__ == "__main__":
    main(lambda config: sys.exit(run(config)), "configs/kimi_k2.py", resumable=False)
