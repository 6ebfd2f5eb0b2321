"""What the folders of tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    """A folder where XLA's work is kept for tests, and processes, that run the same programs."""
    return tmp_path_factory.mktemp("compiled_programs")
