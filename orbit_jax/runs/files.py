"""Files that are whole or absent, and JSON that every reader accepts."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` so that a reader, or a kill, sees the old file or the new one, never a half."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, none without one, up to one that is cut.

    A kill in mid-write cuts one, or a full disk.
    """
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of nested dicts, sequences, numbers and arrays; NaN and infinities become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # bare NaN is not JSON
    if hasattr(value, "tolist"):  # numpy and jax, arrays and scalars
        return _plain(value.tolist())
    return value


def require_folder(name: str, path: str) -> None:
    """Makes a folder for results, before the work for them.

    Raises:
      ValueError: if there can be none.
    """
    problem = "give the name of one"
    if path:
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{error.strerror}; name another"
        else:
            return
    raise ValueError(f"{name}={path!r}: there can be no such folder: {problem}")
