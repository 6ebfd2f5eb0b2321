"""What the machine of a run is doing: memory, disk, and NVIDIA's GPUs where NVML answers.

NVML comes with the driver; the package `nvidia-ml-py` reads it. Of each GPU it gives load and
reasons of throttling at this moment, memory errors since the driver was loaded, and Xids, the
driver's error codes, that came up since this process began to listen. What came before, and the
text beside a Xid, stands in the kernel's log alone. A GPU that cannot tell something, as a part of
one (MIG) often cannot, leaves it out.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import psutil

# Bits of a GPU's reasons to run slower that tell of trouble. Left out: idle, limits that somebody
# has set, and the power cap, which a busy GPU may always touch.
THROTTLING = {
    0x08: "hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "power brake",
}
# The driver's error codes. Those of a program, which its own errors tell of, are not reported.
XIDS = {
    48: "a memory error that ECC could not correct",
    63: "a row of memory waits to be replaced",
    64: "a row of memory could not be replaced",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its processor GSP does not answer",
}
_XIDS_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
_MOST_EVENTS = 100  # that are read at once


class Gpu(NamedTuple):
    """A GPU as NVML knows it: its number there, its handle, and where its Xids arrive."""

    number: int
    handle: Any
    events: Any


class Hardware:
    """Reads the machine now and then; of several processes each sees its own.

    Args:
      folder: whose disk is watched.
      seconds: between readings; in between there is nothing to tell.
      nvml: the module `pynvml`, or None; by default as `find_nvml` finds it.
    """

    def __init__(self, folder: Path, seconds: float, nvml: ModuleType | None = None):
        self._folder, self._seconds = folder, seconds
        self._nvml = nvml or find_nvml()
        self._gpus = tuple(_visible(self._nvml)) if self._nvml else ()
        self._xids: dict[int, int] = {}  # by GPU, the last that came
        self._next = float("-inf")

    def read(self) -> dict[str, float]:
        """Metrics `hardware/...`, or none if the last reading is not long ago."""
        now = time.monotonic()
        if now < self._next:
            return {}
        self._next = now + self._seconds
        found = {
            "process_memory_gb": psutil.Process().memory_info().rss / 1e9,
            "host_memory_share": host_memory_share(),
            "disk_free_gb": shutil.disk_usage(self._folder).free / 1e9,
            **_device_memory(),
        }
        for gpu in self._gpus:
            found |= {f"gpu{gpu.number}/{name}": v for name, v in self._of_gpu(gpu).items()}
        return {f"hardware/{name}": value for name, value in found.items()}

    def _of_gpu(self, gpu: Gpu) -> dict[str, float]:
        nvml, handle = self._nvml, gpu.handle
        queries = {
            "load": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        found = {}
        for name, query in queries.items():
            with contextlib.suppress(nvml.NVMLError):  # this GPU cannot tell
                found[name] = float(query())
        if gpu.events is not None:
            with contextlib.suppress(nvml.NVMLError):  # that no more have come is told by an error
                for _ in range(_MOST_EVENTS):
                    xid = nvml.nvmlEventSetWait(gpu.events, 0).eventData
                    if xid not in _XIDS_OF_PROGRAMS:
                        self._xids[gpu.number] = xid
            found["xid"] = float(self._xids.get(gpu.number, 0))
        return found


def find_nvml() -> ModuleType | None:
    """`pynvml`, if JAX computes on GPUs, the package is there, and NVML answers."""
    if jax.default_backend() != "gpu":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def host_memory_share(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """How much of the host's memory is in use; of a container's or job's limit, if that is more.

    Args:
      groups: where Linux shows control groups (version 2).
      own: the file that names this process's group.
    """
    memory = psutil.virtual_memory()
    shares = [1 - memory.available / memory.total]
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if path is not None:
        group = groups / path
        for folder in (group, *group.parents):
            if folder.is_relative_to(groups):
                shares += _group_share(folder)
    return max(shares)


def _group_share(folder: Path) -> list[float]:
    """The share of its limit that a control group uses, caches of files left out; [] without."""
    limit = folder / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    if text == "max":
        return []
    facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / "memory.current").read_text()) - int(facts["inactive_file"])
    return [used / int(text)]


def _device_memory() -> dict[str, float]:
    """Of the fullest device of this process, where devices keep count."""
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    stats = [one for one in stats if "bytes_limit" in one]
    if not stats:
        return {}
    return {
        "device_memory_gb": max(one["bytes_in_use"] for one in stats) / 1e9,
        "device_memory_peak_share": max(
            one["peak_bytes_in_use"] / one["bytes_limit"] for one in stats
        ),
    }


def _visible(nvml: ModuleType) -> Iterator[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by number or by UUID, or all.

    Numbers are NVML's, by the bus; CUDA counts likewise where all GPUs are alike.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    with contextlib.suppress(nvml.NVMLError):  # from the first that is unknown on, CUDA has none
        names = range(nvml.nvmlDeviceGetCount()) if named is None else named.split(",")
        for name in names:
            if str(name).isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            yield Gpu(nvml.nvmlDeviceGetIndex(handle), handle, _listen(nvml, handle))


def _listen(nvml: ModuleType, handle: Any) -> Any:
    """Where a GPU's Xids arrive from now on, or None if it cannot tell them."""
    with contextlib.suppress(nvml.NVMLError):
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events
    return None
