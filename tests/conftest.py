"""What the folders of tests share."""

import os
from pathlib import Path

import jax
import psutil
import pytest

_MOST_BYTES = 3 << 30  # of a process of tests; beyond, what it has compiled is given back


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    """A folder where XLA's work is kept for tests, and processes, that run the same programs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return folder / "compiled_programs"


@pytest.fixture(scope="module")
def compiled_once(compiled_programs):
    """Every run makes its programs anew; this lets them share what XLA made of them."""
    jax.config.update("jax_compilation_cache_dir", str(compiled_programs))
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_given_back():
    """Some hundred programs are compiled in one process, and stay with their functions."""
    yield
    if psutil.Process().memory_info().rss > _MOST_BYTES:
        jax.clear_caches()
