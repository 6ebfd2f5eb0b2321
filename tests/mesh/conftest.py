"""The process with eight devices: their number is fixed when a process starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def eight_devices() -> dict:
    """The figures that `eight_devices.py` prints."""
    told = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "eight_devices.py")],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parent / 'model'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return json.loads(told.stdout.splitlines()[-1])
