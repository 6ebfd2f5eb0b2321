"""Does a compiled program hold a second copy of a stack of weights, in whatever form?

A stack that XLA widens, transposes or gathers as a whole decides whether a model fits at all, and
the program's text shows it before anything runs.
A copy in many pieces, one array for each layer, is not found here; `memory_analysis()` shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from orbit_jax.plan import hlo

# Names for arrays that stand elsewhere: in a parameter, in a loop's first value, in a branch.
_ALIASES = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "opt-barrier",
    "while",
    "conditional",
    "call",
}
# Computations of these are programs of their own; those of a fusion exist in registers only.
_FLOW = {"while", "conditional", "call"}


@dataclass(frozen=True)
class Stack:
    """An array as large as a stack of weights, which is none of the program's arguments.

    Attributes:
      name: of the instruction that makes it; `opcode`: what it does.
      shape: on one device, such as `bf16[61,48,2048,7168]`.
      source: path of transformations and name scopes, as JAX wrote it.
    """

    name: str
    opcode: str
    shape: str
    bytes: int
    source: str


def stacks(text: str, arguments: Sequence[jax.ShapeDtypeStruct]) -> list[Stack]:
    """Arrays at least as large as the smallest of `arguments`, the largest first.

    Left out are parameters, other names for them, and arrays in the shape of another parameter of
    the program (a cache or an adapter that is updated; what else is large there is no weight).

    Args:
      text: of a compiled program, `compiled.as_text()`.
      arguments: the stacks to watch, shaped and, on a mesh, sharded as the program takes them. Any
        number of them; not so small that activations are larger.

    Raises:
      ValueError: if the program has no parameter like one of them: nothing would be watched.
    """
    module = hlo.parse(text)
    parameters = [one for one in module.computations[module.entry] if one.opcode == "parameter"]
    taken = {array for one in parameters for array in one.arrays}
    watched = [_local(argument) for argument in arguments]
    for array in watched:
        if not any((array.dims, array.bytes) == (one.dims, one.bytes) for one in taken):
            raise ValueError(f"the program has no parameter {array}: are shapes those it takes?")
    smallest = min(array.bytes for array in watched)
    others = {array.dims for array in taken} - {array.dims for array in watched}
    found = []
    for name in _computations(module):
        for one in module.computations[name]:
            if one.opcode in _ALIASES or one.opcode.endswith("-start"):
                continue
            found += [
                Stack(one.name, one.opcode, str(array), array.bytes, one.op_name)
                for array in one.arrays
                if array.bytes >= smallest and array.dims not in others
            ]
    return sorted(found, key=lambda stack: -stack.bytes)


def _local(argument: jax.ShapeDtypeStruct) -> hlo.Array:
    """What one device holds of it, with the width of its type as a type of HLO."""
    shape = argument.shape
    if argument.sharding is not None:
        shape = argument.sharding.shard_shape(shape)
    return hlo.Array(f"u{argument.dtype.itemsize * 8}", tuple(shape))


def _computations(module: hlo.Module) -> list[str]:
    """Those whose instructions have memory of their own, each once, from the entry on."""
    names = [module.entry]
    for name in names:
        for one in module.computations[name]:
            if one.opcode in _FLOW:
                names += [called for called in one.called if called not in names]
    return names
