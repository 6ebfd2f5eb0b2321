"""The compiler for devices that are not there: XLA's own, from a plug-in that needs no GPU.

`make plan` puts the plug-in into a folder of its own. Installed beside jax it would look for a GPU
at the start of every run.
"""

import sys
from pathlib import Path

import jax
from jax.experimental import topologies

from orbit_jax.plan.devices import Device

PLUGIN = Path(__file__).parents[2] / ".gpu_compiler"  # in the repository's root, see the Makefile


def available() -> bool:
    """Whether the plug-in is there."""
    return (PLUGIN / "jax_plugins").is_dir()


def set_up(count: int) -> None:
    """Makes this process one that compiles and never runs: `count` simulated devices, no GPU.

    To be called before any other use of jax.
    """
    if available() and str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def options() -> dict[str, str]:
    """What compiling for GPUs needs besides a program's own options: where the assembler is."""
    return {"xla_gpu_cuda_data_dir": str(PLUGIN / "nvidia/cuda_nvcc")} if available() else {}


def devices_of(device: Device, count: int) -> tuple[jax.Device, ...]:
    """`count` devices of that kind in one node, which programs can be compiled for.

    Without the plug-in, as many simulated CPU devices.
    """
    if not available():
        return tuple(jax.devices()[:count])
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=device.target_config
    )
    return tuple(topology.devices)
