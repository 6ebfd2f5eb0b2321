"""What a run has trained, read back beside the base that it belongs to."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbit_jax import startup
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.checkpoint import run_state
from orbit_jax.config import Config, from_config_dict


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """The run's folder and a whole checkpoint of it: `source` is either."""
    if run_state.NAME.fullmatch(source.name):
        return source.parent.parent, source
    folder = source / "checkpoints"
    if not (source / "config.json").is_file() or not folder.is_dir():
        raise ValueError(f"{source} is no run folder: give one that has config.json, checkpoints/")
    found = run_state.latest(folder)
    if found.path is None:
        raise ValueError(f"{source} has no whole checkpoint: let the run save one first")
    return source, found.path


def config_of(source: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config of a run for one process, however many trained it.

    Args:
      source: the run's folder, or a checkpoint in it.
      overrides: values of fields by their dotted names, as `sampler.slots`.
    """
    folder, _ = find_checkpoint(source)
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in (overrides or {}).items():
        *path, last = name.split(".")
        functools.reduce(lambda section, part: section.setdefault(part, {}), path, given)[last] = (
            value
        )
    return in_one_process(from_config_dict(given))


def in_one_process(config: Config) -> Config:
    """The same config, for one process."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, processes=1))


def load_policy(source: Path, config: Config, frozen: startup.Frozen) -> tuple[Adapter, int]:
    """The adapter of a run's newest whole checkpoint, or of one, and the steps it was trained for.

    Raises:
      ValueError: if `source` is neither, or belongs to another base or another adapter's config.
    """
    _, checkpoint = find_checkpoint(source)
    state, facts = run_state.restore(checkpoint.absolute(), startup.train_state(config, frozen))
    if facts["base_hash"] != frozen.hash:
        raise ValueError(
            f"{checkpoint} was trained on the base with hash {facts['base_hash'][:12]}, "
            f"{config.base.path} has {frozen.hash[:12]}: name the right one"
        )
    run_state.check_adapter(facts, state.policy.methods)
    return state.policy, facts["step"]
