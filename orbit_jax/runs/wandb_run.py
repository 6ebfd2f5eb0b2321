"""Weights & Biases, for those who ask for it by `run.wandb`: a run's numbers, sent there as well.

The package is imported only then. It says itself what it does about logins and without a network
(`WANDB_MODE=offline`). Whatever goes wrong in it is told once; the run goes on without it.
"""

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orbit_jax.runs.files import write_atomic

_ID = "wandb_id.txt"  # in the run folder: a resumed run goes on with it


def require_installed(project: str) -> None:
    """Refuses a project without the package, before long work.

    Raises:
      ValueError: with the remedy.
    """
    if project:
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:  # a folder `wandb`, of earlier runs, is no package
            raise ValueError(
                f"config.run.wandb={project!r}: the package wandb is not installed: run "
                "'pip install wandb', or leave the field empty"
            )


def begin(
    config: Mapping[str, Any], folder: Path, tell: Callable[[str], None]
) -> "WandbRun | None":
    """The counterpart of a run whose config asks for one."""
    project = config["run"].get("wandb", "")
    require_installed(project)
    return WandbRun(config, folder, tell) if project else None


class WandbRun:
    """The run's counterpart at W&B.

    Its id is kept in the run's folder. W&B takes a step only once: rows that a resumed run does
    again are ignored there, and they are the same.

    Args:
      config: of the run, with `run.wandb`, the project.
      folder: the run's; W&B's own files go there too.
      tell: takes a line for the terminal and the log.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, tell: Callable[[str], None]):
        self._tell, self._run = tell, None
        id_file = folder / _ID
        if not id_file.exists():
            write_atomic(id_file, secrets.token_hex(4))
        self._guarded(lambda: self._begin(config, folder, id_file.read_text(encoding="utf-8")))

    def _begin(self, config: Mapping[str, Any], folder: Path, run_id: str) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config["run"]["wandb"],
            name=folder.name,
            id=run_id,
            resume="allow",
            config=config,
            dir=str(folder),
            settings=wandb.Settings(console="off"),  # the live view is none of its business
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of a step."""
        if self._run:
            self._guarded(lambda: self._run.log(dict(numbers), step=step))

    def close(self) -> None:
        """Ends it; with a network that is slow, this is where one waits."""
        if self._run:
            self._guarded(self._run.finish)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the package, or the network, may raise anything
            self._run = None
            self._tell(f"W&B: {type(error).__name__}: {error}; the run goes on without it")
