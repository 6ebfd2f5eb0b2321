"""What both ways of training are asked to do, and what a step of either sends and takes."""

from dataclasses import dataclass

from orbit_jax.plan.devices import DEVICES_PER_NODE, Device

USABLE = 0.94  # of a device's memory: its runtime, libraries and fragments take the rest


@dataclass(frozen=True)
class Workload:
    """One PPO step: rollouts are drawn, then trained on once.

    Attributes:
      rows: rollouts of a step.
      tokens_per_row: of prompt and completion together.
      rows_at_once: that are sampled at the same time and so have a cache.
      micro_batch_tokens: that a device has in its layers at one time while training; of adapters,
        that the devices over `tensor` have together.
      utilisation: share of a device's bf16 peak that matrix products reach. An assumption, the same
        for training and sampling, though sampling token by token reaches less.
      usable_memory: share of a device's memory that may be planned.
    """

    rows: int = 512
    tokens_per_row: int = 4096
    rows_at_once: int = 128
    micro_batch_tokens: int = 8192
    utilisation: float = 0.35
    usable_memory: float = USABLE

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.tokens_per_row

    def bytes_per_device(self, device: Device) -> float:
        """Memory of a device that may be planned."""
        return self.usable_memory * device.memory_bytes

    def seconds(self, device: Device, devices: int, operations_per_token: float) -> float:
        """Of the matrix products of a step, spread over all devices."""
        return self.tokens * operations_per_token / (devices * self.utilisation * device.bf16_flops)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in a step, to its own node over links and to others."""

    link_bytes: float = 0.0
    network_bytes: float = 0.0

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(times * self.link_bytes, times * self.network_bytes)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.link_bytes + other.link_bytes, self.network_bytes + other.network_bytes)

    def seconds(self, device: Device) -> float:
        """At full speed; links and network work at the same time."""
        return max(
            self.link_bytes / device.link_bytes_per_second,
            self.network_bytes / device.network_bytes_per_second,
        )


@dataclass(frozen=True)
class Times:
    """Of a step, in seconds. `communication` is by purpose; `sent` has the bytes behind it."""

    compute: float
    communication: dict[str, float]
    sent: dict[str, Traffic]

    @classmethod
    def of(cls, device: Device, compute: float, sent: dict[str, Traffic]) -> "Times":
        """From bytes, at the device's speeds."""
        return cls(compute, {name: one.seconds(device) for name, one in sent.items()}, sent)

    @property
    def step(self) -> float:
        """With nothing overlapped."""
        return self.compute + sum(self.communication.values())

    def share(self, *purposes: str) -> float:
        """Of the step's time that these purposes take; of all communication for none named."""
        named = purposes or tuple(self.communication)
        return sum(self.communication[name] for name in named) / self.step


def gathered(total_bytes: float, devices: int) -> Traffic:
    """What a device sends for all to have what is spread over all; a reduce-scatter sends as much.

    Between nodes each of the eight devices carries an eighth; the eight then exchange it by links.
    """
    near = min(DEVICES_PER_NODE, devices)
    nodes = devices / near
    return Traffic(
        link_bytes=total_bytes * (near - 1) / near,
        network_bytes=total_bytes * (nodes - 1) / nodes / near,
    )


def scattered(sent_bytes: float, devices: float) -> Traffic:
    """What a device sends whose `sent_bytes` go to all devices alike, itself included."""
    near = min(DEVICES_PER_NODE, devices)
    return Traffic(
        link_bytes=sent_bytes * (near - 1) / devices,
        network_bytes=sent_bytes * (devices - near) / devices,
    )
