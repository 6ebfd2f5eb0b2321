"""What a compiled program sends between devices: its collectives, how often each runs, and why.

Bytes are those that one device sends, by the algorithms that send least: rings and direct exchange.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbit_jax.parity import Programs
from orbit_jax.plan import hlo
from orbit_jax.rl.rollouts import Rollouts

PURPOSES = ("routing", "dense", "head", "adapter", "other")
_SCOPE = re.compile(rf"\b({'|'.join(PURPOSES[:-1])})\b")
# By the number of devices n: what one device sends, as a share of its result.
_SENT = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # (n - 1) / n of the operand
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclass(frozen=True)
class Collective:
    """One exchange between devices, as it stands in the program.

    Attributes:
      kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
      purpose: one of `PURPOSES`, the innermost name scope of that name that it was written in.
      bytes: that one device sends each time.
      executions: times that it runs; for one in a loop of unknown length, in one turn of it.
      devices_in_group: that exchange with each other.
      shape: of its result on one device, such as `bf16[32,64]`.
      loop: the outermost loop around it whose number of turns is not known, as that of decoding;
        empty for none.
    """

    kind: str
    purpose: str
    bytes: int
    executions: int
    devices_in_group: int
    shape: str
    loop: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.executions

    @property
    def per_token(self) -> bool:
        """Whether `executions` is for one turn of a loop of unknown length."""
        return bool(self.loop)


def collectives(text: str) -> list[Collective]:
    """The collectives of a program's text, in the order in which they stand.

    Of a conditional's branches the one that sends most counts.

    Raises:
      ValueError: if it is not a program's text, or groups of devices are spelt in an unknown way.
    """
    module = hlo.parse(text)

    @functools.cache
    def of(computation: str) -> list[Collective]:
        found, body = [], module.computations.get(computation, ())
        purposes = _purposes(body)
        for instruction in body:
            kind = instruction.opcode.removesuffix("-start")
            # What completes an asynchronous instruction may name its computation once more.
            done = instruction.opcode.endswith(("-done", "-update"))
            inner = [] if done else [of(name) for name in instruction.called]
            if kind in _SENT:
                found += _collective(kind, instruction, module.devices, purposes)
            elif kind == "while":
                found += [_repeated(instruction, one) for body in inner for one in body]
            elif kind == "conditional":
                found += max(inner, key=lambda branch: sum(one.total_bytes for one in branch))
            else:
                found += [one for body in inner for one in body]
        return found

    return of(module.entry)


def summary(found: Sequence[Collective], turns: int = 1, calls: int = 1) -> dict[str, int]:
    """Bytes that one device sends, by purpose; those of zero too.

    Args:
      turns: of loops of unknown length, in all calls. Where there are several, as decoding has one
        for each number of rows, the one that sends most counts for all turns.
      calls: of the program.
    """
    loops: dict[str, int] = dict.fromkeys((one.loop for one in found if one.loop), 0)
    for one in found:
        if one.loop:
            loops[one.loop] += one.total_bytes
    heaviest = max(loops, key=loops.get, default="")
    sent = dict.fromkeys(PURPOSES, 0)
    for one in found:
        if one.loop in ("", heaviest):
            sent[one.purpose] += one.total_bytes * (turns if one.loop else calls)
    return sent


def of_step(programs: Programs, rollouts: Rollouts) -> dict[str, float]:
    """Metrics `traffic/{purpose}_mb`: megabytes that one device sent for rollouts and their step.

    Counted in the two programs as they were called last; of one device there are none. Each call of
    the sampler counts for as long prompts as the last one.
    """
    if programs.model.mesh.size == 1:
        return {}
    sampling = summary(_read(programs.sample.text), rollouts.decode_steps, rollouts.calls)
    training = summary(_read(programs.ppo_step.text))
    return {f"traffic/{name}_mb": (sampling[name] + training[name]) / 1e6 for name in PURPOSES}


_read = functools.lru_cache(maxsize=8)(collectives)  # a step's few programs come again


def _repeated(loop: hlo.Instruction, one: Collective) -> Collective:
    turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if turns:
        return dataclasses.replace(one, executions=one.executions * int(turns[1]))
    return dataclasses.replace(one, loop=loop.name)


def _collective(
    kind: str,
    instruction: hlo.Instruction,
    devices: int,
    purposes: Mapping[tuple[str, int], str],
) -> list[Collective]:
    """One for each array: XLA sends several at once, for whatever purposes."""
    # An asynchronous start returns its operands first; only that of all-reduce does not.
    started = instruction.opcode.endswith("-start") and kind != "all-reduce"
    result = hlo.arrays(instruction.parts[1] if started else instruction.type)
    group = _group(instruction.rest, devices)
    of_all = _purpose(instruction)
    return [
        Collective(
            kind=kind,
            purpose=purposes.get((instruction.name, i), of_all),
            bytes=round(_SENT[kind](group) * array.bytes),
            executions=1,
            devices_in_group=group,
            shape=str(array),
        )
        for i, array in enumerate(result)
    ]


def _purposes(body: Sequence[hlo.Instruction]) -> dict[tuple[str, int], str]:
    """Of the parts of tuples, by the instruction that made the tuple: what takes a part says it."""
    started, found = {}, {}
    for instruction in body:
        if instruction.opcode.endswith("-done"):
            started[instruction.name] = instruction.operands[0]
        elif instruction.opcode == "get-tuple-element" and instruction.op_name:
            maker = instruction.operands[0]
            index = int(re.search(r"\bindex=(\d+)", instruction.rest)[1])
            found[started.get(maker, maker), index] = _purpose(instruction)
    return found


def _purpose(instruction: hlo.Instruction) -> str:
    scopes = _SCOPE.findall(instruction.op_name)
    return scopes[-1] if scopes else "other"


def _group(rest: str, devices: int) -> int:
    """How many devices exchange with each other; XLA has several spellings for it."""
    if found := re.search(r"source_target_pairs=\{([\d,{}]*)\}", rest):
        return len(set(re.findall(r"\d+", found[1])))
    if re.search(r"replica_groups=\{\}", rest):
        return devices
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        # An axis may be split: 'tensor':(1)2 is the part of size 2 behind 1.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"groups of devices are spelt in an unknown way: {rest[:200]}")
