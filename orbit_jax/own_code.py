"""Code of one's own that a config names, as `my_rl.py:my_loss`: read once, its text in a hash."""

import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def is_own(name: str) -> bool:
    """Whether a name is that of something in a file, `my_file.py:name`."""
    return re.fullmatch(r".+\.py:\w+", name) is not None


def load_own(name: str) -> Any:
    """The function or class of `my_file.py:name`.

    It is the same object at each call while the file is unchanged: programs are compiled anew for
    another function.

    Raises:
      ValueError: if there is no such file or name, or the file cannot be executed.
    """
    path, _, what = name.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    module = _module(str(Path(path).resolve()), Path(path).stat().st_mtime_ns)
    if not hasattr(module, what):
        raise ValueError(f"{path} has no {what}: name what the file defines, as '{path}:name'")
    return getattr(module, what)


def own_hash(names: Iterable[str]) -> str | None:
    """SHA-256 of the files that names lie in; None where nothing among them is one's own."""
    paths = sorted({name.rpartition(":")[0] for name in names if is_own(name)})
    texts = b"".join(Path(path).read_bytes() for path in paths)
    return hashlib.sha256(texts).hexdigest() if paths else None


@functools.cache
def _module(path: str, changed: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a file of one's own raises, the file is what to mend
        del sys.modules[path]
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return module
