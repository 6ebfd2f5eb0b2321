"""The rules of alerts about the machine: memory, disk, GPUs. They read the newest row alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orbit_jax.runs.hardware import THROTTLING, XIDS

if TYPE_CHECKING:
    from orbit_jax.alerts_config import AlertsConfig
    from orbit_jax.runs.alert_rules import Seen

_OTHER_XID = "look it up in NVIDIA's list"


def memory(seen: "Seen", limits: "AlertsConfig") -> str | None:
    """A device, or the host, is near the end of its memory."""
    row = seen.rows[-1]
    for share, what, remedy in (
        (
            row.get("hardware/device_memory_peak_share"),
            "of a device were in use at the peak",
            "raise ppo.micro_batches, lower sampler.slots, or set ppo.remat=always",
        ),
        (
            row.get("hardware/host_memory_share"),
            "of the host's memory, or of the job's limit, are in use",
            "end what else runs there, lower task.grader_workers or tools.sandbox_workers",
        ),
    ):
        if share is not None and share > limits.memory_share:
            return f"{share:.0%} {what}, above {limits.memory_share:.0%}: {remedy}"
    return None


def disk(seen: "Seen", limits: "AlertsConfig") -> str | None:
    """The disk of the run folder is nearly full."""
    free = seen.rows[-1].get("hardware/disk_free_gb")
    if free is None or free >= limits.disk_free_gb:
        return None
    return (
        f"{free:.1f} GB are free on the disk of the run folder, less than "
        f"{limits.disk_free_gb:g}: free some, or lower run.keep_checkpoints"
    )


def gpu_errors(seen: "Seen", limits: "AlertsConfig") -> str | None:
    """A GPU has had errors that ECC could not correct, or its driver told of one (Xid)."""
    row = seen.rows[-1]
    told = [
        f"GPU {gpu} has had {count:.0f} memory errors that ECC could not correct"
        for gpu, count in _of_gpus(row, "ecc_uncorrected")
        if count
    ]
    told += [
        f"GPU {gpu} reported Xid {xid:.0f} ({XIDS.get(int(xid), _OTHER_XID)})"
        for gpu, xid in _of_gpus(row, "xid")
        if xid
    ]
    if not told:
        return None
    return (
        f"{'; '.join(told)}: what it computes cannot be trusted; go on from a checkpoint on "
        "another, and let it be reset and tested"
    )


def gpu_throttling(seen: "Seen", limits: "AlertsConfig") -> str | None:
    """A GPU is slowed down by heat or by its supply of power."""
    told = [
        f"GPU {gpu} ({', '.join(reasons)})"
        for gpu, bits in _of_gpus(seen.rows[-1], "throttle_reasons")
        if (reasons := [what for bit, what in THROTTLING.items() if int(bits) & bit])
    ]
    if not told:
        return None
    return f"slowed down: {'; '.join(told)}: look after its cooling and power supply"


def gpu_temperature(seen: "Seen", limits: "AlertsConfig") -> str | None:
    """A GPU is hot."""
    hot = [x for x in _of_gpus(seen.rows[-1], "celsius") if x[1] > limits.gpu_celsius]
    if not hot:
        return None
    told = ", ".join(f"GPU {gpu} has {celsius:.0f} °C" for gpu, celsius in hot)
    return f"{told}, above {limits.gpu_celsius:g}: look after its cooling"


def _of_gpus(row: Mapping[str, Any], what: str) -> list[tuple[str, float]]:
    """Number and value of each GPU that has told this."""
    found = (name.split("/") for name in row if name.startswith("hardware/gpu"))
    return [
        (gpu.removeprefix("gpu"), row[f"hardware/{gpu}/{of}"]) for _, gpu, of in found if of == what
    ]
