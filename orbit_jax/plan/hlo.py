"""The text of a compiled program (`compiled.as_text()`), read as far as a plan needs it.

One line is one instruction: `%name = TYPE opcode(operands), attributes`. A TYPE is an array such as
`bf16[8,64]{1,0}` or a tuple of types. Shapes are those of one device.
"""

import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,})]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclass(frozen=True)
class Array:
    """An array's type: `dtype` in HLO's spelling (bf16, s32, pred), and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Without padding; 0 for tokens."""
        if self.dtype == "pred":
            return math.prod(self.dims)
        bits = _BITS.match(self.dtype)
        return math.prod(self.dims) * int(bits[1]) // 8 if bits else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `rest` is what stands behind the opcode."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its type, tuples taken apart."""
        return arrays(self.type)

    @property
    def parts(self) -> tuple[str, ...]:
        """The types that its tuple is made of; the type itself where it is no tuple."""
        return _parts(self.type[1:-1]) if self.type.startswith("(") else (self.type,)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads."""
        return tuple(re.findall(r"%?([\w.-]+)(?:, |$)", self.rest.partition(")")[0]))

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it refers to."""
        found = [one or several for one, several in _CALLED.findall(self.rest)]
        return tuple(name.strip(" %") for names in found for name in names.split(","))

    @property
    def op_name(self) -> str:
        """The path of transformations and name scopes that JAX wrote, or nothing."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, the name of the first, and the number of devices."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    devices: int


def parse(text: str) -> Module:
    """Reads a program.

    Raises:
      ValueError: if the text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.fullmatch(line.strip()):
            body = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.strip() == "}":
            body = None
        elif body is not None and (found := _INSTRUCTION.fullmatch(line)):
            body.append(_instruction(*found.groups()))
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    counts = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))
    devices = math.prod(int(n) for n in counts.values())
    return Module({name: tuple(body) for name, body in computations.items()}, entry, devices)


def arrays(type_text: str) -> tuple[Array, ...]:
    """The arrays of a type, tuples taken apart."""
    return tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(type_text)
    )


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    return Instruction(name, text[:end], opcode, rest)


def _closing(text: str) -> int:
    """Where the parenthesis closes that `text` begins with."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    raise ValueError(f"unbalanced parentheses in {text[:80]}")


def _parts(text: str) -> tuple[str, ...]:
    """Splits at the commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts)
