"""The plan as a picture: a bar for each program, stacked of what lies on a device meanwhile."""

from pathlib import Path

from matplotlib.figure import Figure

from orbit_jax.plan.plan import Plan


def draw(plan: Plan, path: Path) -> None:
    """Writes the stacked bars, with the device's memory as a line, to a PNG."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    temporaries = {name: program.temporaries for name, program in plan.programs.items()}
    if not temporaries:
        temporaries = {"sample": plan.guess.sample, "ppo_step": plan.guess.ppo_step}
    names = list(temporaries)
    left = [0.0] * len(names)
    for part, size in plan.parts.items():
        if size:
            axes.barh(names, size / 1e9, left=left, label=part)
            left = [start + size / 1e9 for start in left]
    axes.barh(names, [s / 1e9 for s in temporaries.values()], left=left, label="temporaries")
    axes.axvline(plan.device.memory_bytes / 1e9, color="black", linestyle="--")
    axes.set_xlabel(f"GB of each of {plan.count} {plan.device.name} (dashed: its memory)")
    axes.set_title(f"{plan.model.name}, {plan.source}: {plan.node_fraction:.1%} at the widest")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=150)
