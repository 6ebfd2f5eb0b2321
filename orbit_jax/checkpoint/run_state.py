"""State of a run on disk: arrays and host facts in one orbax checkpoint, whole or absent."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

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
    if _is_whole(path):
        if _load(path, facts=ocp.args.JsonRestore())["facts"] != facts:
            raise ValueError(
                f"checkpoint: {path} already holds another state of step {step}; "
                "remove it to go on from an earlier step"
            )
        return path
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(_named(tree)), facts=ocp.args.JsonSave(facts)
    )
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=items)
    for old in _whole(checkpoints)[:-keep_last]:
        leaving = old.rename(old.with_name(f"{old.name}.leaving"))  # no half one by a whole name
        shutil.rmtree(leaving)
    return path


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
    path = path.absolute()
    if not _is_whole(path):
        raise ValueError(f"checkpoint: {path} is not a whole checkpoint; name one that `save` made")
    wanted = {name: _abstract(leaf) for name, leaf in _named(abstract_tree).items()}
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata["state"].tree
    _refuse_mismatch(path, wanted, stored)
    items = _load(path, state=ocp.args.StandardRestore(wanted), facts=ocp.args.JsonRestore())
    leaves = [items["state"][name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), items["facts"]


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


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


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
    handlers = {"state": ocp.StandardCheckpointHandler(), "facts": ocp.JsonCheckpointHandler()}
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers))
