"""State of a run on disk: arrays and host facts in one orbax checkpoint, whole or absent.

A checkpoint is a folder that gets its name when all is in it, with a manifest of its files: one
that a kill or a full disk left half written has another name, and one that lost bytes later is
found out and passed over. Of several processes the first alone reads and writes files, whole
arrays; the others send it their parts and receive them.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from orbit_jax import processes

NAME = re.compile(r"step_\d{6,}")
SHOWN_MISMATCHES = 20  # a wrong config may disagree on every leaf
_MANIFEST = "files.json"  # size and hash of each file of a checkpoint, and its quality


class Found(NamedTuple):
    """What `latest` found."""

    path: Path | None  # the newest whole checkpoint
    ignored: list[str]  # names of half-written and damaged ones, for the log


class Saver:
    """Writes the checkpoints of one run while it goes on: one at a time, in their order.

    Args:
        checkpoints, keep_last: as of `save`.
    """

    def __init__(self, checkpoints: Path, keep_last: int):
        self._checkpoints, self._keep_last = checkpoints, keep_last
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future | None = None

    def save(
        self,
        step: int,
        tree: Any,
        facts: Mapping[str, Any],
        quality: float | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Takes a copy of the arrays, which may be donated afterwards, and begins to write it.

        Args:
            step, tree, facts, quality, files: as of `save`.

        Raises:
            OSError: what kept an earlier checkpoint from being written.
        """
        self.wait()
        content = _content(step, tree, facts, quality, files)
        if processes.is_first():
            self._writing = self._thread.submit(
                _write, self._checkpoints.absolute(), self._keep_last, content
            )

    def settle(self) -> None:
        """Raises what kept a checkpoint from being written, if that is known by now."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def wait(self) -> None:
        """Returns when all is on disk; raises what kept it from there."""
        processes.by_first(self.finish)

    def finish(self) -> None:
        """The same for this process alone, whatever has become of others."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class _Content(NamedTuple):
    """What a checkpoint is made of, on the host."""

    step: int
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    quality: float | None
    files: Mapping[str, bytes]


def save(
    checkpoints: Path,
    step: int,
    tree: Any,
    facts: Mapping[str, Any],
    keep_last: int,
    quality: float | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes `checkpoints/step_<step>/`; removes all but the `keep_last` newest ones and the best.

    Returns when all is on disk. One of that step that is already there is replaced.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: how many steps are done.
        tree: any pytree of arrays.
        facts: what the host knows (data cursor, base hash, adapter version), as JSON values;
            `step` is added.
        keep_last: at least 1.
        quality: what the best checkpoint has most of; one without it is not compared.
        files: by their names further files of the checkpoint.
    """
    content = _content(step, tree, facts, quality, files)
    processes.by_first(_write, checkpoints.absolute(), keep_last, content)
    return checkpoints.absolute() / f"step_{step:06d}"


def _content(
    step: int,
    tree: Any,
    facts: Mapping[str, Any],
    quality: float | None,
    files: Mapping[str, bytes] | None,
) -> _Content:
    # Copies: on a CPU what is read may be the memory of the array itself, which will be donated.
    arrays = {name: np.array(x) for name, x in processes.read(_named(tree)).items()}
    facts = json.loads(json.dumps({"step": step, **facts}))
    return _Content(step, arrays, facts, quality, files or {})


def _write(checkpoints: Path, keep_last: int, content: _Content) -> None:
    path = checkpoints / f"step_{content.step:06d}"
    half = path.with_name(f"{path.name}.half")
    _remove(half)  # of a run that was killed
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(content.arrays), facts=ocp.args.JsonSave(content.facts)
    )
    with _checkpointer() as checkpointer:
        checkpointer.save(half, args=items)
    for name, data in content.files.items():
        (half / name).write_bytes(data)
    files = {str(f.relative_to(half)): _seal(f) for f in half.rglob("*") if f.is_file()}
    manifest = {"quality": content.quality, "files": files}
    (half / _MANIFEST).write_text(json.dumps(manifest))
    _remove(path)  # one that was passed over, as damaged
    half.rename(path)
    kept = {*_whole(checkpoints)[-keep_last:], best(checkpoints)}
    for old in _whole(checkpoints):
        if old not in kept:
            _remove(old)


def _remove(path: Path) -> None:
    if path.exists():
        leaving = path.with_name(f"{path.name}.leaving")  # no half one by a whole name
        shutil.rmtree(leaving, ignore_errors=True)
        shutil.rmtree(path.rename(leaving))


def latest(checkpoints: Path) -> Found:
    """The newest whole checkpoint, if any, and the names of those that it ignores."""
    ignored = [path.name for path in checkpoints.iterdir() if not _is_whole(path)]
    for path in reversed(_whole(checkpoints)):
        if _is_intact(path):
            return Found(path, sorted(ignored))
        ignored.append(path.name)
    return Found(None, sorted(ignored))


def best(checkpoints: Path) -> Path | None:
    """The whole checkpoint of the highest quality, the newest of several; None if none has any."""
    ranked = [path for path in _whole(checkpoints) if _quality(path) is not None]
    return max(ranked, key=lambda path: (_quality(path), _step(path)), default=None)


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


def stored_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by their paths in the tree, as they are on disk."""
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path.absolute()).item_metadata["state"].tree
    shapes = {n: np.broadcast_to(np.zeros((), x.dtype), x.shape) for n, x in stored.items()}
    return _load(path.absolute(), state=ocp.args.StandardRestore(shapes))["state"]


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
    return sorted((path for path in checkpoints.iterdir() if _is_whole(path)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_whole(path: Path) -> bool:
    """Whether it has all its files, in their sizes."""
    if not NAME.fullmatch(path.name) or not (path / _MANIFEST).is_file():
        return False
    try:
        files = _manifest(path)["files"]
    except ValueError:  # the manifest itself was cut
        return False
    return all(
        (path / name).is_file() and (path / name).stat().st_size == seal[0]
        for name, seal in files.items()
    )


def _is_intact(path: Path) -> bool:
    """Whether its files are as they were written, which takes reading them."""
    return all(_seal(path / name) == seal for name, seal in _manifest(path)["files"].items())


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / _MANIFEST).read_text())


def _quality(path: Path) -> float | None:
    return _manifest(path)["quality"]


def _seal(file: Path) -> list[int | str]:
    """Size and hash."""
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "blake2b").hexdigest()[:32]]


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
