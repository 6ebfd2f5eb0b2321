"""What crosses the walls of the sandbox: frames of bytes, and plain values as JSON.

Both sides import this file, the sandboxed one by its path, so it needs the standard library alone.
A plain value is None, a bool, number, text, bytes, range, list, tuple, set or dict of such;
anything else stays where it is and crosses as a reference. What comes out of a sandbox is made of
exactly these types, so no `__eq__` of a program's own comes with it.
"""

import os
from collections.abc import Callable
from typing import Any

EXACT_IN_JSON = 1 << 53  # longer integers go as hexadecimal: any length, in linear time

_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def frame(data: bytes) -> bytes:
    """The bytes with their length before them."""
    return len(data).to_bytes(4, "big") + data


def write_frame(descriptor: int, data: bytes) -> None:
    """Write one frame; blocks until the other side has room."""
    rest = memoryview(frame(data))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int) -> bytes:
    """Read one frame; blocks. Raises EOFError when the other side is gone."""
    return read_frame_by(lambda count: os.read(descriptor, count))


def read_frame_by(read: Callable[[int], bytes]) -> bytes:
    """Read one frame by a function that returns at most so many bytes, none at the end."""

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = read(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError("the other side of the sandbox is gone")
            data += part
        return bytes(data)

    return exactly(int.from_bytes(exactly(4), "big"))


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as what JSON can hold.

    Args:
      value: anything; subclasses of the plain types go as the plain type.
      refer: gives what to refer by to a value that is not plain, such as its number, as JSON can
        hold it; or raises TypeError.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return value if -EXACT_IN_JSON < value < EXACT_IN_JSON else {"int": hex(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in value]}
    return {"reference": refer(value)}


def decode(data: Any, resolve: Callable[[Any], Any]) -> Any:
    """The value that `encode` gave as `data`.

    Raises:
      ValueError, TypeError: when `data` is no such thing; it may come from untrusted code.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "range":
        return range(*content)
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, resolve) for item in content)
    if kind == "reference":
        return resolve(content)
    raise ValueError(f"a value of the unknown kind {kind!r}")
