"""Accelerators that a plan is made for: published rates, and what the compiler must know of each.

Rates are peaks. `memory_bytes` is what the driver reports, which is what a program can ask for, and
not the number on the data sheet; a process's own context takes up to a gigabyte of it.
"""

import difflib
from dataclasses import dataclass

DEVICES_PER_NODE = 8


@dataclass(frozen=True)
class Device:
    """One accelerator of a node of eight. Rates are bytes or operations per second.

    Attributes:
      bf16_flops: of dense matrices, without sparsity.
      link_bytes_per_second: to the other devices of its node (NVLink), in each direction.
      network_bytes_per_second: to other nodes, in each direction.
      host_link_bytes_per_second: to the memory of its host (PCIe), in each direction.
      host_memory_bytes: of a node, for all its devices together; so `disk_bytes`.
      cores: streaming multiprocessors; clock_ghz: theirs at most. Without it the compiler's cost
        model would fuse next to nothing.
      l2_bytes: of the cache that they share.
      compute_capability: such as `(10, 0)`.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    bf16_flops: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    host_link_bytes_per_second: float
    host_memory_bytes: int
    disk_bytes: int
    cores: int
    clock_ghz: float
    l2_bytes: int
    compute_capability: tuple[int, int]

    @property
    def target_config(self) -> str:
        """Text of the `GpuTargetConfigProto` with which XLA compiles for this device.

        It goes to `jax.experimental.topologies.get_topology_desc` as `target_config`.
        """
        major, minor = self.compute_capability
        name = f"NVIDIA {self.name.upper()}"
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  fpus_per_core: 128
  core_count: {self.cores}
  clock_rate_ghz: {self.clock_ghz}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {self.memory_bytes_per_second:.0f}
  l2_cache_size: {self.l2_bytes}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: ACCELERATED_FEATURES
  }}
  name: "{name}"
}}
platform_name: "CUDA"
dnn_version_info {{
  major: 9
  minor: 10
}}
device_description_str: "{name}"
"""


def find(name: str) -> Device:
    """The device of that name, in any case.

    Raises:
      ValueError: for a device that is not in the table.
    """
    if name.lower() in _DEVICES:
        return _DEVICES[name.lower()]
    close = difflib.get_close_matches(name.lower(), _DEVICES, n=1)
    hint = f" did you mean {close[0]}?" if close else ""
    raise ValueError(f"device={name} is not known:{hint} known are {', '.join(_DEVICES)}")


# Memory, its rate, cores, L2 and compute capability: what a machine reports, as recorded by OpenXLA
# (github.com/openxla/xla, xla/backends/gpu/target_config/specs/{h100_sxm,h200,b200}.txtpb).
# Host memory (2 TB), disks (8 x 3.84 TB) and network cards (one of 400 Gb/s per device): NVIDIA's
# user guides of DGX H100/H200 and DGX B200 (docs.nvidia.com/dgx/dgxb200-user-guide).
# Host link: PCIe 5.0 x16, 32 GT/s with 128b/130b coding; B300's hosts have no faster one.
_HOST = {
    "host_link_bytes_per_second": 63e9,
    "host_memory_bytes": 2 * 10**12,
    "disk_bytes": 8 * 3_840 * 10**9,
}
_TABLE = (
    # nvidia.com/en-us/data-center/h100: SXM, 1,979 TFLOPS of bf16 with sparsity, half without;
    # NVLink 900 GB/s in both directions together.
    Device(
        name="h100",
        memory_bytes=84_942_979_072,
        memory_bytes_per_second=3.35232e12,
        bf16_flops=989.5e12,
        link_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        cores=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        compute_capability=(9, 0),
        **_HOST,
    ),
    # nvidia.com/en-us/data-center/h200: as H100 but for 141 GB of memory at 4.8 TB/s.
    Device(
        name="h200",
        memory_bytes=151_397_597_184,
        memory_bytes_per_second=4.8e12,
        bf16_flops=989.5e12,
        link_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        cores=132,
        clock_ghz=1.98,
        l2_bytes=52_428_800,
        compute_capability=(9, 0),
        **_HOST,
    ),
    # nvidia.com/en-us/data-center/hgx: HGX B200, 36 PFLOPS of bf16 with sparsity for eight, half
    # without; NVLink 1.8 TB/s in both directions together.
    Device(
        name="b200",
        memory_bytes=191_514_411_008,
        memory_bytes_per_second=7.67232e12,
        bf16_flops=2.25e15,
        link_bytes_per_second=900e9,
        network_bytes_per_second=50e9,
        cores=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        compute_capability=(10, 0),
        **_HOST,
    ),
    # HGX B300: bf16 and NVLink of the same page, equal to B200's; ConnectX-8, 800 Gb/s per device.
    # nvidia-smi of "B300 SXM6 AC" reports 275,040 MiB, PyTorch 148 cores; OpenXLA's b300.txtpb says
    # 297 GB and 158 cores and names no machine, so rate and L2 are those of its gb300.txtpb, which
    # does (data sheet: 288 GB, 8 TB/s).
    Device(
        name="b300",
        memory_bytes=275_040 * 2**20,
        memory_bytes_per_second=7.928064e12,
        bf16_flops=2.25e15,
        link_bytes_per_second=900e9,
        network_bytes_per_second=100e9,
        cores=148,
        clock_ghz=1.965,
        l2_bytes=135_528_448,
        compute_capability=(10, 3),
        **_HOST,
    ),
)
_DEVICES = {device.name: device for device in _TABLE}
