"""The run's configuration: an ml_collections file becomes one frozen, validated tree at the door.

Every field is documented in `configs/tiny_moe.py`, whose values are the defaults here. Inside the
program only these dataclasses travel; they are hashable, so the parts that shapes depend on serve
as static arguments of a jit.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from orbit_jax.adapter_config import AdapterConfig
from orbit_jax.alerts_config import AlertsConfig
from orbit_jax.config_rules import require_valid
from orbit_jax.own_code import own_hash
from orbit_jax.ppo_config import PPOConfig
from orbit_jax.tasks.problems import TRAINED_DIFFICULTIES, UNSEEN_DIFFICULTY


@dataclasses.dataclass(frozen=True)
class BaseConfig:
    """The frozen model; `random` weights are a rehearsal in the structure of a `config.json`."""

    path: str = "orbit_jax/assets/tiny_moe_int4"
    own: tuple[str, ...] = ()
    weights: str = "checkpoint"
    working_copy: str = "auto"
    working_copy_share: float = 0.1


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Where problems come from, and how they are graded."""

    mixture: tuple[str, ...] = ("sums",)
    data_seed: int = 0
    train_problems: int = 10_000
    heldout_problems: int = 500
    unseen_problems: int = 500
    difficulties: tuple[str, ...] = TRAINED_DIFFICULTIES
    unseen_difficulty: str = UNSEEN_DIFFICULTY
    system: str = ""
    grader_workers: int = 1
    grader_max_seconds: float = 5.0
    max_grading_seconds: float = 300.0
    partial_credit: bool = False


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """What a reward is made up of, besides the grader's value."""

    correctness: float = 1.0
    format: str = ""
    format_weight: float = 0.1
    length_buffer: int = 0
    length_weight: float = 0.5


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
    """Which tools there are, how they are called, and how far."""

    use: tuple[str, ...] = ()
    syntax: str = ""
    max_turns: int = 4
    max_seconds: float = 10.0
    workers: int = 16
    program_seconds: float = 8.0
    isolation: str = "strict"
    sandbox_workers: int = 2


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How rollouts are drawn."""

    prompts_per_step: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_prompt_tokens: int = 20
    max_completion_tokens: int = 44
    slots: int = 0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and gradient clipping."""

    learning_rate: float = 5e-4
    critic_learning_rate: float = 2e-3
    warmup_steps: int = 5
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along the two axes, and the processes that they belong to."""

    data: int = 1
    tensor: int = 1
    simulate: bool = False
    processes: int = 1
    process: int = -1
    coordinator: str = ""

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.tensor


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation during the run; before and after it, all held-out problems are used."""

    every_steps: int = 10
    problems: int = 128


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The run folder."""

    root: str = "runs"
    compilation_cache: bool = True
    checkpoint_every_steps: int = 50
    keep_checkpoints: int = 2
    samples_every_steps: int = 10
    wandb: str = ""


@dataclasses.dataclass(frozen=True)
class Config:
    """All of it."""

    experiment: str = "ppo_math"
    seed: int = 0
    steps: int = 60
    parity: str = "auto"
    base: BaseConfig = BaseConfig()
    adapter: AdapterConfig = AdapterConfig()  # noqa: RUF009 (frozen, as those of this file)
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    tools: ToolsConfig = ToolsConfig()
    sampler: SamplerConfig = SamplerConfig()
    ppo: PPOConfig = PPOConfig()  # noqa: RUF009, it is frozen too
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    alerts: AlertsConfig = AlertsConfig()  # noqa: RUF009, so is it

    @property
    def code_hash(self) -> str | None:
        """Of the files of one's own code that fields name, tasks too; None without any."""
        tasks = (entry.rpartition("*")[2] for entry in self.task.mixture)  # less their weights
        fields = (self.ppo.loss, self.ppo.advantage, self.adapter.method, *self.base.own)
        return own_hash([*fields, *tasks])

    @property
    def rows(self) -> int:
        """Rollouts of a step."""
        return self.sampler.prompts_per_step * self.sampler.group_size

    @property
    def decoded_rows(self) -> int:
        """Rollouts that decode together; the others of a step wait for one of them to end."""
        return self.sampler.slots or self.rows

    @property
    def num_slots(self) -> int:
        """Positions per row: a multiple of 64, where attention's sums over slots end neutrally."""
        tokens = self.sampler.max_prompt_tokens + self.sampler.max_completion_tokens
        return -(-tokens // 64) * 64


def from_config_dict(given: Any) -> Config:
    """Turns an `ml_collections.ConfigDict` (or a plain dict) into a validated `Config`.

    What `base.own` names is known to every loader from then on.

    Raises:
      ValueError: for an unknown field, a value of the wrong type, or values that contradict each
        other; the sentence names the field, the value and the remedy.
    """
    config = _read(Config, given.to_dict() if hasattr(given, "to_dict") else given, "config")
    require_valid(config)
    return config


def to_dict(config: Config) -> dict:
    """The plain nested dict of a config, as it is written to the run folder."""
    return dataclasses.asdict(config)


def _read(kind: type, given: dict, path: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}={given!r}: expected a section with the fields {sorted(fields)}")
    for name, value in given.items():
        here = f"{path}.{name}"
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {path}.{close[0]}?" if close else f"fields are {sorted(fields)}"
            raise ValueError(f"{here}: there is no such field; {hint}")
        default = fields[name].default
        if dataclasses.is_dataclass(default):
            values[name] = _read(type(default), value, here)
        else:
            values[name] = _typed(default, value, here)
    return kind(**values)


def _typed(default: Any, value: Any, path: str) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}={value!r}: expected a list such as {default[:2]}")
        one = default[0] if default else ""  # what is empty unless it is given, are names
        return tuple(_typed(one, item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}={value!r}: must be a finite number")
    if type(value) is not type(default):
        raise ValueError(
            f"{path}={value!r}: expected {type(default).__name__}, such as {default!r}"
        )
    return value
