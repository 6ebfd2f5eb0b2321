"""Numbers as people read them."""

import pytest

from orbit_jax.runs.printing import quantity, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (3.5, "4 B"),
        (1000, "1.00 kB"),
        (12_580_000, "12.58 MB"),
        (594_205_351_936, "594.21 GB"),
        (1.0857e15, "1,085.70 TB"),
    ],
)
def test_bytes(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (9_999_999, "9,999,999"),
        (1_362_818_048, "1,363 M"),
        (1_026_408_232_448, "1,026.4 G"),
    ],
)
def test_parameters(number, text):
    assert quantity(number) == text
