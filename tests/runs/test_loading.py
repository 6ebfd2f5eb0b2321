"""What is seen of loading: nothing of a moment's, lines with rate and ETA of a long one."""

import io

import pytest
from rich.console import Console

from orbit_jax.runs import loading, progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_long_load_tells_how_far_it_is_and_a_short_one_nothing(clock):
    out = io.StringIO()
    tell = loading.Loading(Console(file=out, width=100))
    total = 40 * 10**9
    for second in range(41):
        clock[0] += 1
        tell(second * 10**9, total)
    lines = out.getvalue().splitlines()
    assert 3 <= len(lines) <= 6
    assert "MB 40000/40000 100%" in lines[-1]
    assert "1000.00 MB/s  ETA 0:09" in lines[-2]
    short = io.StringIO()
    tell = loading.Loading(Console(file=short, width=100))
    clock[0] += 1
    tell(5, 10)
    tell(10, 10)
    assert short.getvalue() == ""
