"""What lies on one device during a run: its parts by name, and what each program needs beside them.

Sizes of parts follow from shapes and shardings; of temporaries the compiler has the last word.
"""

import math
from dataclasses import dataclass

import jax

from orbit_jax.plan.programs import Arguments

# Parts that a program takes as arguments; the others lie there while it runs.
TAKEN = {
    "sample": ("base", "policy", "cache", "rollouts"),
    "ppo_step": ("base", "policy", "reference", "critic", "moments", "batch"),
}


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device while a program runs.

    Attributes:
      arguments: that it takes; temporaries: that it sets aside, with results that replace no
        argument; resident: parts of the run that it does not take.
    """

    arguments: int
    temporaries: int
    resident: int

    @property
    def total(self) -> int:
        """All together."""
        return self.arguments + self.temporaries + self.resident


def device_bytes(tree) -> int:
    """Bytes that one device holds of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def parts(given: Arguments) -> dict[str, int]:
    """Bytes of one device by part of the run; what a run does not have is 0."""
    state = given.state
    critic = state.critic and (state.critic.adapter, state.critic.head)
    return {
        "base": device_bytes(given.base),
        "policy": device_bytes(state.policy),
        "reference": device_bytes(state.reference),
        "critic": device_bytes(critic),
        "moments": device_bytes(state.optimizer),
        "cache": device_bytes(given.slots.cache),
        "rollouts": device_bytes((given.slots.replace(cache=None), given.incoming)),
        "batch": device_bytes(given.batch),
    }


def of_program(name: str, executable: jax.stages.Compiled, held: dict[str, int]) -> ProgramMemory:
    """The compiler's figures of `sample` or `ppo_step`, with what else lies on the device."""
    found = executable.memory_analysis()
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return ProgramMemory(
        arguments=found.argument_size_in_bytes,
        temporaries=found.temp_size_in_bytes + new,
        resident=sum(size for part, size in held.items() if part not in TAKEN[name]),
    )
