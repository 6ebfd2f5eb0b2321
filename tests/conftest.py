"""What the folders of tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    """A folder where XLA's work is kept for tests, and processes, that run the same programs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return folder / "compiled_programs"
