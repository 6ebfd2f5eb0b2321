"""Parts of a `quantization_config`, each checked as it is read; all raise `ValueError` by name."""

from typing import Any


def section(config: dict, name: str) -> dict:
    """An object within another; empty where there is none."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"config.json: quantization_config: {name}={value!r} must be an object")
    return value


def strings(config: dict, name: str) -> list[str]:
    """A list of strings; empty where there is none."""
    value = config.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(
            f"config.json: quantization_config: {name}={value!r} must be a list of names"
        )
    return value


def only(config: dict, name: str, *allowed: Any) -> None:
    """Refuses other values than these; a number is not taken for a truth value."""
    value = config.get(name)
    if not any(type(value) is type(one) and value == one for one in allowed):
        names = " or ".join(map(repr, allowed))
        raise ValueError(
            f"config.json: quantization_config: {name}={value!r} is not supported: "
            f"use a checkpoint with {names}"
        )
