"""The section `alerts` of the configuration: which alerts there are, when they go off, who is told.

None of it changes what a run computes: a resumed run may have another.
"""

import dataclasses
import shlex
import shutil
from collections.abc import Iterator

from orbit_jax.runs.alert_rules import RULES


@dataclasses.dataclass(frozen=True)
class AlertsConfig:
    """Thresholds of `runs/alert_rules.py`, how often the machine is read, and a command to call."""

    off: tuple[str, ...] = ()
    command: str = ""
    command_seconds: float = 10.0
    hardware_seconds: float = 60.0
    entropy_share: float = 0.05
    length_growth: float = 3.0
    truncated_share: float = 0.5
    router_growth: float = 2.0
    stuck_steps: int = 200
    kl_rollout: float = 0.1
    kl_reference: float = 1.0
    infra_share: float = 0.05
    memory_share: float = 0.95
    disk_free_gb: float = 2.0
    gpu_celsius: float = 87.0


POSITIVE = """
    alerts.command_seconds alerts.length_growth alerts.truncated_share alerts.router_growth
    alerts.stuck_steps alerts.kl_rollout alerts.kl_reference alerts.memory_share alerts.gpu_celsius
"""
NOT_NEGATIVE = """
    alerts.hardware_seconds alerts.entropy_share alerts.infra_share alerts.disk_free_gb
"""
FIELDS = tuple(f"alerts.{field.name}" for field in dataclasses.fields(AlertsConfig))


def requirements(alerts: AlertsConfig) -> Iterator[tuple[bool, str, str]]:
    """What must hold of the section, whose numbers are in their ranges.

    Yields:
      Whether it does, the field that is to blame, and the remedy.
    """
    unknown = [name for name in alerts.off if name not in RULES]
    yield not unknown, "alerts.off", f"{unknown} are no alerts; there are {', '.join(RULES)}"
    try:
        words = shlex.split(alerts.command)
    except ValueError as error:
        yield False, "alerts.command", f"cannot be read ({error}): quote it as for a shell"
    else:
        yield (
            not words or shutil.which(words[0]) is not None,
            "alerts.command",
            f"there is no program {words and words[0]!r}: give one that can be run, with its path",
        )
