"""What is read of the machine, with an NVML of the test's own."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from orbit_jax.runs import hardware as module
from orbit_jax.runs.hardware import Hardware, find_nvml, host_memory_share

HOST = {"hardware/process_memory_gb", "hardware/host_memory_share", "hardware/disk_free_gb"}


class NVMLError(Exception):
    pass


class FakeNvml:
    """GPUs as dicts of what they tell; what one lacks raises, as NVML does."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: dict):
        for number, gpu in enumerate(gpus):
            gpu.setdefault("number", number)
            gpu.setdefault("xids", [])
        self.gpus = list(gpus)

    @staticmethod
    def _of(gpu: dict, what: str):
        if what not in gpu:
            raise NVMLError("Not Supported")
        return gpu[what]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> dict:
        if number >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[number]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict:
        for gpu in self.gpus:
            if gpu.get("uuid") == uuid:
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetIndex(self, gpu: dict) -> int:
        return gpu["number"]

    def nvmlDeviceGetUtilizationRates(self, gpu: dict) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._of(gpu, "load"), memory=0)

    def nvmlDeviceGetTemperature(self, gpu: dict, sensor: int) -> int:
        return self._of(gpu, "celsius")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: dict) -> int:
        return self._of(gpu, "reasons")

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self._of(gpu, "ecc")

    def nvmlEventSetCreate(self) -> list:
        return []

    def nvmlDeviceRegisterEvents(self, gpu: dict, kinds: int, events: list) -> None:
        assert kinds == 8
        events.append(self._of(gpu, "xids"))

    def nvmlEventSetWait(self, events: list, milliseconds: int) -> SimpleNamespace:
        assert milliseconds == 0
        if not events[0]:
            raise NVMLError("Timeout")
        return SimpleNamespace(eventData=events[0].pop(0))


def whole(**facts) -> dict:
    return {"load": 87, "celsius": 61, "reasons": 0x4, "ecc": 0} | facts


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def of_gpu(found: dict, number: int) -> dict:
    prefix = f"hardware/gpu{number}/"
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def test_host_and_disk_are_read_where_there_is_no_gpu(tmp_path):
    found = Hardware(tmp_path, 0).read()
    assert set(found) == HOST
    assert 0 < found["hardware/host_memory_share"] < 1
    assert found["hardware/process_memory_gb"] > 0.01
    assert found["hardware/disk_free_gb"] > 0


def test_there_is_nothing_to_tell_until_the_next_reading_is_due(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    hardware = Hardware(tmp_path, 60)
    assert hardware.read()
    now += 59
    assert hardware.read() == {}
    now += 1
    assert hardware.read()


def test_each_gpu_tells_load_temperature_throttling_and_errors(tmp_path):
    nvml = FakeNvml(whole(), whole(load=3, celsius=90, reasons=0x48, ecc=2))
    found = Hardware(tmp_path, 0, nvml).read()
    calm = {"load": 0.87, "celsius": 61, "throttle_reasons": 4, "ecc_uncorrected": 0, "xid": 0}
    assert of_gpu(found, 0) == calm
    assert of_gpu(found, 1) == {
        "load": 0.03,
        "celsius": 90,
        "throttle_reasons": 0x48,
        "ecc_uncorrected": 2,
        "xid": 0,
    }


def test_what_a_gpu_cannot_tell_is_left_out(tmp_path):
    part = {"celsius": 50}
    hardware = Hardware(tmp_path, 0, FakeNvml(part))
    assert of_gpu(hardware.read(), 0) == {"celsius": 50, "xid": 0}
    del part["celsius"]  # it is lost
    assert of_gpu(hardware.read(), 0) == {"xid": 0}


def test_a_gpu_that_cannot_tell_of_xids_tells_the_rest(tmp_path):
    nvml = FakeNvml(whole())
    del nvml.gpus[0]["xids"]
    found = of_gpu(Hardware(tmp_path, 0, nvml).read(), 0)
    assert found["load"] == 0.87
    assert "xid" not in found


def test_a_xid_stays_until_the_next_and_those_of_programs_are_none(tmp_path):
    nvml = FakeNvml(whole(), whole())
    hardware = Hardware(tmp_path, 0, nvml)
    xids = nvml.gpus[1]["xids"]
    told = []
    for new in ([], [31], [79, 45, 45], [], [94]):
        xids += new
        found = hardware.read()
        told.append(of_gpu(found, 1)["xid"])
        assert of_gpu(found, 0)["xid"] == 0
    assert told == [0, 0, 79, 79, 94]


def test_only_an_error_of_nvml_is_passed_over(tmp_path):
    hardware = Hardware(tmp_path, 0, FakeNvml(whole(celsius="hot")))
    with pytest.raises(ValueError, match="hot"):
        hardware.read()


@pytest.mark.parametrize(
    ("visible", "numbers"), [("2,0", {0, 2}), ("GPU-b", {1}), ("", set()), ("-1", set()), ("7", ())]
)
def test_only_the_gpus_that_the_run_may_use_are_watched(tmp_path, monkeypatch, visible, numbers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FakeNvml(*(whole(uuid=f"GPU-{letter}") for letter in "abc"))
    found = Hardware(tmp_path, 0, nvml).read()
    assert {n for n in range(3) if of_gpu(found, n)} == set(numbers)


def test_nvml_is_asked_only_where_jax_computes_on_gpus(monkeypatch):
    class Nvml(SimpleNamespace):
        NVMLError = NVMLError

        def nvmlInit(self) -> None:
            if self.broken:
                raise NVMLError("Driver Not Loaded")

    for backend, broken, answers in (("gpu", 0, True), ("gpu", 1, False), ("cpu", 0, False)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=broken))
        assert (find_nvml() is not None) == answers
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert find_nvml() is None


def test_the_fullest_device_is_told(tmp_path, monkeypatch):
    one = {"bytes_in_use": 4e9, "peak_bytes_in_use": 9e9, "bytes_limit": 10e9}
    other = {"bytes_in_use": 5e9, "peak_bytes_in_use": 6e9, "bytes_limit": 10e9}
    devices = [SimpleNamespace(memory_stats=lambda s=s: s) for s in (one, other, None)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    found = Hardware(tmp_path, 0).read()
    assert found["hardware/device_memory_gb"] == 5
    assert found["hardware/device_memory_peak_share"] == 0.9


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_a_job_near_its_own_limit_is_near_it_on_a_large_host(tmp_path, monkeypatch):
    memory = SimpleNamespace(available=90, total=100)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    own, groups = tmp_path / "cgroup", tmp_path / "fs"
    share = lambda: pytest.approx(host_memory_share(groups, own))  # noqa: E731
    assert share() == 0.1  # no control groups
    own.write_text("0::/job/step\n")
    assert share() == 0.1  # no files of theirs
    group(groups / "job" / "step", "max", 85, 0)
    assert share() == 0.1  # no limit
    group(groups / "job", "100", 85, 25)
    assert share() == 0.6  # of the group above, without what can be given back
    memory.available = 5
    assert share() == 0.95  # the host is fuller
    own.write_text("4:memory:/job\n")
    memory.available = 90
    assert share() == 0.1  # version 1 is not read
