"""State of a run on disk: arrays and host facts in one orbax checkpoint, whole or absent.

Of several processes the first alone reads and writes files, whole arrays; the others send it their
parts and receive them.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from orbit_jax import processes

NAME = re.compile(r"step_\d{6,}")
SHOWN_MISMATCHES = 20  # a wrong config may disagree on every leaf


class Found(NamedTuple):
    """What `latest` found."""

    path: Path | None  # the newest whole checkpoint
    half_written: list[str]  # names of what a kill left behind, for the log


def save(checkpoints: Path, step: int, tree: Any, facts: Mapping[str, Any], keep_last: int) -> Path:
    """Writes `checkpoints/step_<step>/` and removes all but the `keep_last` newest ones.

    Returns when all is on disk, so the arrays may be donated afterwards. orbax writes to a
    temporary name and renames at the end. A step that is already there with the same facts is
    kept as it is.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: how many steps are done.
        tree: any pytree of arrays.
        facts: what the host knows (data cursor, base hash, adapter version), as JSON values;
            `step` is added.
        keep_last: at least 1.
    """
    path = checkpoints.absolute() / f"step_{step:06d}"
    facts = json.loads(json.dumps({"step": step, **facts}))
    processes.by_first(_write, path, processes.read(_named(tree)), facts, keep_last)
    return path


def _write(path: Path, arrays: dict[str, Any], facts: dict[str, Any], keep_last: int) -> None:
    if _is_whole(path):
        if _load(path, facts=ocp.args.JsonRestore())["facts"] != facts:
            raise ValueError(
                f"checkpoint: {path} already holds another state of step {facts['step']}; "
                "remove it to go on from an earlier step"
            )
        return
    items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts))
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=items)
    for old in _whole(path.parent)[:-keep_last]:
        leaving = old.rename(old.with_name(f"{old.name}.leaving"))  # no half one by a whole name
        shutil.rmtree(leaving)


def latest(checkpoints: Path) -> Found:
    """The newest whole checkpoint, if any, and the names of half-written ones, which it ignores."""
    whole = _whole(checkpoints)
    half_written = sorted(p.name for p in checkpoints.iterdir() if p not in whole)
    return Found(whole[-1] if whole else None, half_written)


def restore(path: Path, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint back, bit for bit.

    Args:
        path: a checkpoint, as `latest` gives it.
        abstract_tree: the tree that was saved, with `jax.ShapeDtypeStruct` (or arrays) as leaves;
            each array is placed by its leaf's sharding, on the first device where it has none.

    Returns:
        The tree and the facts.
    """
    wanted = _named(abstract_tree)
    # Without memory of their own: they say what orbax is to read, and what others receive.
    arrays = {n: np.broadcast_to(np.zeros((), x.dtype), x.shape) for n, x in wanted.items()}
    facts = processes.by_first(_read, path.absolute(), arrays)
    leaves = [
        processes.put(processes.from_first(arrays[name]), _sharding(leaf))
        for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), facts


def _read(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Puts what is stored in the place of `arrays`, and returns the facts."""
    if not _is_whole(path):
        raise ValueError(f"checkpoint: {path} is not a whole checkpoint; name one that `save` made")
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata["state"].tree
    _refuse_mismatch(path, arrays, stored)
    items = _load(path, state=ocp.args.StandardRestore(arrays), facts=ocp.args.JsonRestore())
    arrays.update(items["state"])
    return items["facts"]


def check_adapter(facts: Mapping[str, Any], methods: str) -> None:
    """Refuses a checkpoint whose adapter had other ranks, scales or exceptions than `methods`.

    Only the folder that training began from can have changed them: a config that did is refused.

    Raises:
      ValueError: if it had.
    """
    then = facts.get("adapter_method")
    if then is not None and then != methods:
        raise ValueError(
            f"checkpoint: it was trained with the adapter {then}, config.adapter.initial says "
            f"{methods}: put that folder back as it was"
        )


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path. Flat, so that no container type (tuples, optax states) needs orbax's help."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _sharding(leaf: Any) -> Sharding:
    return getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])


def _refuse_mismatch(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    def form(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if leaf is not None else "absent"

    pairs = {n: (form(stored.get(n)), form(wanted.get(n))) for n in wanted.keys() | stored.keys()}
    lines = [f"{n}: stored {a}, wanted {b}" for n, (a, b) in sorted(pairs.items()) if a != b]
    if lines:
        more = f"; and {len(lines) - SHOWN_MISMATCHES} more" * (len(lines) > SHOWN_MISMATCHES)
        raise ValueError(
            f"checkpoint: {path.name} does not fit this run's state "
            f"({'; '.join(lines[:SHOWN_MISMATCHES])}{more}); resume with the config that wrote it"
        )


def _whole(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in checkpoints.iterdir() if _is_whole(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _is_whole(path: Path) -> bool:
    parts = (path / "_CHECKPOINT_METADATA", path / "state", path / "facts")
    return NAME.fullmatch(path.name) is not None and all(part.exists() for part in parts)


def _load(path: Path, **items: ocp.args.CheckpointArgs) -> Any:
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=ocp.args.Composite(**items))


def _checkpointer() -> ocp.Checkpointer:
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="first"
    )
    handlers = {
        "state": ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        "facts": ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    }
    both = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone), **handlers
    )
    return ocp.Checkpointer(both, multiprocessing_options=alone)
