"""The process with eight devices: started once, beside the tests that come first.

The number of devices is fixed when a process starts, and compiling for eight takes a while.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_started: list[tuple] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any("eight_devices" in getattr(item, "fixturenames", ()) for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(HERE / "eight_devices.py")],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parent / 'model'}"},
        stdout=out,
        stderr=err,
    )
    _started.append((process, out, err))


def pytest_sessionfinish() -> None:
    for process, *files in _started:
        process.kill()
        process.wait()
        for file in files:
            file.close()


@pytest.fixture(scope="session")
def eight_devices() -> dict:
    """The figures that `eight_devices.py` prints."""
    process, out, err = _started[0]
    code = process.wait(timeout=500)
    out.seek(0)
    err.seek(0)
    assert code == 0, err.read()[-4000:]
    return json.loads(out.read().splitlines()[-1])
