"""The plan of a run: memory, traffic and time of each device, before any weight is loaded."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import jax

from orbit_jax.config import Config
from orbit_jax.plan import compiler, memory
from orbit_jax.plan.counts import Model, count
from orbit_jax.plan.devices import Device
from orbit_jax.plan.estimate import Estimate, estimate
from orbit_jax.plan.memory import ProgramMemory
from orbit_jax.plan.programs import Arguments, compile_programs
from orbit_jax.plan.stacks import Stack, stacks
from orbit_jax.plan.times import Times, predict
from orbit_jax.plan.traffic import collectives, summary
from orbit_jax.plan.workload import USABLE
from orbit_jax.rl.train_state import trainable, trained_parameters

_SMALLEST_STACK = 1 << 30  # bytes of a weight that is watched for copies


@dataclass(frozen=True)
class Plan:
    """What a run takes of each of its devices.

    Attributes:
      source: `compiler` for the device itself, `cpu compiler`, or `estimate` without any.
      parts: bytes by part of the run (see `memory.parts`).
      programs: compiled `sample` and `ppo_step`; empty for an estimate.
      guess: the closed form beside them.
      trained: parameters of the policy; `trained_in_all`: of the critic too; `reduced`: those of
        the latter that are not on experts, whose gradients devices sum.
      sent: bytes that one device sends by purpose, in each program.
      copies: arrays as large as a stack of weights that are none of the program's arguments.
      compile_seconds: of each program.
    """

    config: Config
    device: Device
    model: Model
    source: str
    parts: dict[str, int]
    guess: Estimate
    trained: int
    trained_in_all: int
    reduced: int
    programs: dict[str, ProgramMemory] = field(default_factory=dict)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    copies: dict[str, list[Stack]] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Devices."""
        return self.config.mesh.size

    @property
    def needed(self) -> int:
        """Bytes of a device at the run's widest."""
        if not self.programs:
            return self.guess.total
        return max(program.total for program in self.programs.values())

    @property
    def room(self) -> int:
        """Bytes of a device that a run may take."""
        return int(USABLE * self.device.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.needed <= self.room

    @property
    def node_fraction(self) -> float:
        """Of the devices' memory that is taken at the widest."""
        return self.needed / self.device.memory_bytes

    def times(self, disk_bytes_per_second: float) -> Times:
        """Predicted seconds; communication is counted from the compiled programs."""
        base = self.parts["base"]
        return predict(self.config, self.model, self.device, base, self.sent, disk_bytes_per_second)

    def to_json(self) -> dict:
        """Plain keys and numbers."""
        return {
            "device": self.device.name,
            "count": self.count,
            "source": self.source,
            "model": self.model.name,
            "parameters": self.model.parameters,
            "trained_parameters": self.trained,
            "trained_share": self.trained / self.model.parameters,
            "node_bytes": self.device.memory_bytes * self.count,
            "base_bytes": self.model.base_bytes,
            "parts_per_device": self.parts,
            "programs": {
                name: {
                    "argument_bytes": program.arguments,
                    "temp_bytes": program.temporaries,
                    "resident_bytes": program.resident,
                    "peak_bytes": program.total,
                    "compile_seconds": self.compile_seconds[name],
                    "sent_bytes": self.sent[name],
                    "copies_of_stacks": [dataclasses.asdict(one) for one in self.copies[name]],
                }
                for name, program in self.programs.items()
            },
            "estimate": dataclasses.asdict(self.guess),
            "needed_bytes_per_device": self.needed,
            "node_fraction": self.node_fraction,
            "fits": self.fits,
        }


def check_count(config: Config, count: int) -> None:
    """Refuses a number of devices (0 for any) that is not that of the config's mesh."""
    if count not in (0, config.mesh.size):
        raise ValueError(
            f"count={count}: the config's mesh={config.mesh.data}x{config.mesh.tensor} has "
            f"{config.mesh.size} devices: set --config.mesh.data and --config.mesh.tensor to match"
        )


def require_positive(name: str, value: float) -> None:
    """Refuses a price or rate that is none."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value:g}: must be a number above 0")


def make_plan(
    config: Config, device: Device, given: Arguments, *, compile_them: bool = True
) -> Plan:
    """Plans a run of `config`, whose programs take `given`, on `config.mesh.size` devices."""
    held = memory.parts(given)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given.base))
    trained = trained_parameters(given.state)
    plan = Plan(
        config=config,
        device=device,
        model=count(given.model, Path(config.base.path).name, total),
        source="estimate",
        parts=held,
        guess=estimate(config, given.model, held["base"], trained),
        trained=sum(leaf.size for leaf in jax.tree.leaves(given.state.policy.params)),
        trained_in_all=trained,
        reduced=trained - _on_experts(given),
    )
    if not compile_them:
        return plan
    platform = "gpu" if compiler.available() else "cpu"
    compiled = compile_programs(config, given, platform)
    texts = {name: one.executable.as_text() for name, one in compiled.items()}
    turns = {"sample": config.sampler.max_completion_tokens, "ppo_step": 1}
    watched = _large_stacks(given)
    return dataclasses.replace(
        plan,
        source="compiler" if platform == "gpu" else "cpu compiler",
        programs={
            name: memory.of_program(name, one.executable, held) for name, one in compiled.items()
        },
        sent={name: summary(collectives(text), turns[name]) for name, text in texts.items()},
        copies={name: stacks(text, watched) if watched else [] for name, text in texts.items()},
        compile_seconds={name: one.seconds for name, one in compiled.items()},
    )


def _on_experts(given: Arguments) -> int:
    """Trained parameters that an expert has for itself."""
    params = trainable(given.state.policy, given.state.critic)
    return sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jax.tree_util.DictKey("experts") in path and leaf.shape[1] > 1  # 1: all have it
    )


def _large_stacks(given: Arguments) -> list[jax.ShapeDtypeStruct]:
    """The largest weights, whose second copy would be felt; of a small model none."""
    sizes = {leaf: memory.device_bytes(leaf) for leaf in jax.tree.leaves(given.base["layers"])}
    least = max(_SMALLEST_STACK, max(sizes.values()) // 2)
    return [leaf for leaf, size in sizes.items() if size >= least]
