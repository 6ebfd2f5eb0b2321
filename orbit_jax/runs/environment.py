"""What a run ran on: enough to tell why the bits of two runs may differ."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

KEY_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "aqtp",
    "numpy",
    "ml_dtypes",
    "tokenizers",
    "safetensors",
    "math-verify",
)


def describe_environment() -> dict[str, Any]:
    """The software, the processor, the devices, the commit and the command, as plain JSON values.

    It starts jax's backend, so device settings must be made before.
    """
    cpu_model, cpu_features = _cpu()
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in KEY_PACKAGES},
        "platform": platform.platform(),
        "cpu_model": cpu_model,
        "cpu_features_hash": hashlib.sha256(" ".join(cpu_features).encode()).hexdigest()[:16],
        "cpu_count": os.cpu_count(),
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "git_commit": _read("git", "describe", "--always", "--dirty", "--abbrev=40") or None,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


def command() -> str:
    """What was typed to start this process, without a `--resume`."""
    resume = sys.argv.index("--resume") if "--resume" in sys.argv else len(sys.argv)
    typed = [*sys.argv[:resume], *sys.argv[resume + 2 :]]
    return shlex.join([sys.executable, *(a for a in typed if not a.startswith("--resume="))])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> tuple[str, list[str]]:
    """The processor's name and its sorted instruction-set features (XLA compiles for them)."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        features = facts.get("flags") or facts.get("Features") or ""  # x86, then Arm
        return facts.get("model name") or platform.machine(), sorted(features.split())
    name = _read("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return name, sorted(_read("sysctl", "hw.optional").splitlines())


def _read(*command: str) -> str:
    """The command's output beside this file, empty where the command is missing or fails."""
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
