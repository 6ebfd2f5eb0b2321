"""The run folder: everything that one run reads and writes, under one name."""

import fcntl
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from orbit_jax.runs.environment import describe_environment
from orbit_jax.runs.files import to_json, write_atomic

SUMMARY_KEYS = (
    "experiment",
    "config",
    "seed",
    "steps",
    "seconds",
    "heldout_pass_before",
    "heldout_pass_after",
    "reward_first",
    "reward_last",
    "reward_mean",
    "parity_max_abs_diff",
    "parity_tokens",
    "tokens_per_second",
    "peak_memory_bytes",
    "base_bytes",
    "adapter_bytes",
    "finished",
)


def require_new(path: str | Path, field: str) -> None:
    """Refuses a folder that exists, before there is anything to write to it."""
    if Path(path).exists():
        raise ValueError(f"{field}={str(path)!r} already exists: name a new folder")


@dataclass(frozen=True)
class RunFolder:
    """`<experiment>-<time>-<id>/` with config, environment, log, samples, checkpoints and plots."""

    path: Path

    @classmethod
    def create(
        cls, root: str | Path, experiment: str, config: Mapping[str, Any], name: str = ""
    ) -> "RunFolder":
        """Makes a new folder under `root` and records the config and the environment in it.

        `name` is what it is called, by default the experiment with the time and an id.
        """
        if Path(experiment).name != experiment or experiment.startswith("."):
            raise ValueError(f"config.experiment={experiment!r}: must be a plain name")
        name = name or f"{experiment}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = cls(Path(root).absolute() / name)
        try:
            folder.path.mkdir(parents=True)
            folder.prepare(config)
        except OSError as error:
            raise ValueError(
                f"config.run.root={str(root)!r}: cannot make {folder.path}: {error.strerror}"
            ) from error
        write_atomic(folder.environment, to_json(describe_environment(), indent=2))
        folder.log(f"{experiment} starts")
        return folder

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Makes the folder of a run that another process begins, by `open`; a half is completed."""
        for directory in (self.samples, self.checkpoints, self.replays, self.plots):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / "config.json", to_json(config, indent=2))

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        may_differ: Sequence[str] = (),
        change: Sequence[str] = (),
    ) -> "RunFolder":
        """Opens an earlier run's folder to go on with it, or one that was prepared.

        Args:
            path: the folder that `create` made.
            config: the config of the run that wants to go on.
            may_differ: dotted names of the fields that change neither shapes nor meaning (how
                many steps, how often to report); any other difference is refused, listing all.
            change: names of further ones, which the user wants to differ from here on.
        """
        folder = cls(Path(path).absolute())
        if not (folder.path / "config.json").is_file():
            raise ValueError(
                f"resume: {path} has no config.json; name a folder that an earlier run wrote"
            )
        changed = changes(folder.config(), config)
        for name in change:
            if name not in flat(config):
                raise ValueError(f"change={name!r}: config has no such field")
        refused = [name for name in changed if name not in (*may_differ, *change)]
        if refused:
            raise ValueError(
                f"resume: the config differs from that of {folder.path.name} in "
                f"{'; '.join(changed[name] for name in refused)}; restore these values, start a "
                f"new run, or say that you want it: --change={','.join(refused)}"
            )
        begun = folder.environment.exists()
        told = "".join(f"; {line}" for line in changed.values())
        folder.log(f"{'resumes' if begun else 'starts'}{told}")
        write_atomic(folder.path / "config.json", to_json(config, indent=2))
        now = describe_environment()
        if not begun:
            write_atomic(folder.environment, to_json(now, indent=2))
        earlier = json.loads(folder.environment.read_text(encoding="utf-8"))
        for name, line in changes(earlier, now).items():
            if name != "command":
                folder.log(f"environment changed, bits may differ: {line}")
        return folder

    def lock(self) -> IO[str]:
        """Refuses a second writer until the returned file is closed or this process has ended."""
        file = (self.path / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(
                f"resume: another process is writing {self.path}: wait for it or stop it"
            ) from None
        return file

    @property
    def environment(self) -> Path:
        """What the run began on."""
        return self.path / "environment.json"

    @property
    def samples(self) -> Path:
        """Where `write_samples` writes."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Where `checkpoint.run_state` writes."""
        return self.path / "checkpoints"

    @property
    def replays(self) -> Path:
        """Where batches are kept that no update could be made of, with the state they met."""
        return self.path / "replays"

    @property
    def plots(self) -> Path:
        """Where pictures go."""
        return self.path / "plots"

    def config(self) -> dict[str, Any]:
        """The config that the run was started, or last resumed, with."""
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))

    def log(self, text: str) -> None:
        """Appends one dated line to `log.txt`."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Writes one JSON line per sample of a step; a step that is run again replaces its file."""
        path = self.samples / f"step_{step:06d}.jsonl"
        write_atomic(path, "".join(f"{to_json(row)}\n" for row in rows))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Writes `summary.json`, whose keys are exactly `SUMMARY_KEYS`: scripts read them."""
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        unknown = [key for key in summary if key not in SUMMARY_KEYS]
        if missing or unknown:
            raise ValueError(
                f"summary: missing keys {missing}, unknown keys {unknown}; "
                "give each of SUMMARY_KEYS once and nothing else"
            )
        path = self.path / "summary.json"
        write_atomic(path, to_json({key: summary[key] for key in SUMMARY_KEYS}, indent=2))
        return path


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Dotted field -> "field: old -> new", for each that differs or that one side lacks.

    Of configs as they are in files: a tuple is a list.
    """
    before, after = (flat(json.loads(to_json(config))) for config in (old, new))
    return {
        name: f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name, "absent") != after.get(name, "absent")
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted field -> value, of nested sections."""
    fields = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields
