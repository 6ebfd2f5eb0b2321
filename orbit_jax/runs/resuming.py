"""Going on with a run: its folder, the checkpoint to begin from, and what must not have changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from orbit_jax import alerts_config
from orbit_jax.checkpoint import run_state
from orbit_jax.runs.folder import RunFolder

State = TypeVar("State")

# Fields of a config that a resumed run may change: they alter neither shapes nor meaning.
MAY_DIFFER = (
    "steps",
    "ppo.dynamic_sampling",  # how far a step may go on, not what it draws until then
    "parity",  # every recipe but `corrected`, which warns, is held to the same difference: 0
    "evaluation.every_steps",
    "run.checkpoint_every_steps",
    "run.keep_checkpoints",
    "run.samples_every_steps",
    "run.wandb",
    "run.root",
    "run.compilation_cache",
    "task.grader_workers",
    "task.grader_max_seconds",
    "task.max_grading_seconds",
    "mesh.processes",
    "mesh.process",
    "mesh.coordinator",
    "base.path",  # the base's hash is compared instead
    *alerts_config.FIELDS,
)
HASHED = {"data": "config.task.mixture", "code": "config's own code (my_file.py:name)"}


class Opened(NamedTuple):
    """A run's folder, the checkpoint in it to go on from, if any, and what there is to say."""

    path: str
    checkpoint: str | None
    remarks: list[str]


def open_folder(
    config: Mapping[str, Any], resume: str, change: Sequence[str]
) -> tuple[IO[str], Opened]:
    """Makes a run's folder, or opens that of an earlier run, and locks it.

    Raises:
      ValueError: if another process writes there, or the config differs in other fields than those
        of MAY_DIFFER and `change`.
    """
    if not resume:
        folder = RunFolder.create(config["run"]["root"], config["experiment"], config)
        return folder.lock(), Opened(str(folder.path), None, [])
    folder = RunFolder.open(resume, config, MAY_DIFFER, change)
    lock = folder.lock()
    found = run_state.latest(folder.checkpoints)
    remarks = [f"ignored the half-written or damaged checkpoint {name}" for name in found.ignored]
    return lock, Opened(str(folder.path), found.path and str(found.path), remarks)


def read_state(
    checkpoint: Path, state: State, facts: Mapping[str, Any]
) -> tuple[State, dict[str, Any]]:
    """The state of a checkpoint and its facts, if they belong to the run that has `facts`.

    Raises:
      ValueError: if the checkpoint belongs to another base, other data, other code of one's own or
        another adapter.
    """
    state, stored = run_state.restore(checkpoint, state)
    if stored["base_hash"] != facts["base_hash"]:
        raise ValueError(
            f"resume: {checkpoint.name} was trained on the base {stored['base_hash'][:12]}, "
            f"base.path holds {facts['base_hash'][:12]}: name the right base"
        )
    for what, files in HASHED.items():
        then, now = stored.get(f"{what}_hash"), facts.get(f"{what}_hash")
        if then != now:
            raise ValueError(
                f"resume: {checkpoint.name} was trained on other {what} (hash {then!s:.12}, now "
                f"{now!s:.12}): put the files of {files} back as they were"
            )
    run_state.check_adapter(stored, facts.get("adapter_method", ""))
    return state, stored
