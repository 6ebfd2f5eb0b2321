"""Fields of a `config.json`, each checked as it is read; all raise `ValueError` by name."""

from typing import Any


def read(hf: dict, *names: str, default: Any = None) -> Any:
    """The value of a field under any of its names, all of which must agree."""
    values = [hf[name] for name in names if hf.get(name) is not None] or [default]
    if values[0] is None:
        raise ValueError(f"config.json: the field {names[0]} is missing")
    if any(value != values[0] for value in values):
        raise ValueError(f"config.json: {' and '.join(names)} contradict each other: {values}")
    return values[0]


def count(hf: dict, *names: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = read(hf, *names, default=default)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {names[0]}={value!r} must be a whole number of at least 1")
    return value


def positive(name: str, value: object) -> float:
    """A value as a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {name}={value!r} must be a number above 0")
    return float(value)


def number(fields: dict, name: str, default: float) -> float:
    """A number, `default` where there is none."""
    value = fields.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name}={value!r} must be a number")
    return float(value)
