import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("os.abort()", "second\n"),
        ("os.kill(os.getpid(), 9)", "second\n"),
        ("words.take_back(); os.abort()", ""),
    ],
)
def test_the_last_words_are_said_whatever_ends_the_process_unless_they_are_taken_back(rest, said):
    program = f"""
import os
from orbit_jax.last_words import LastWords
words = LastWords()
words.prepare("first")
words.prepare("second")
{rest}
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert ended.returncode < 0
    assert ended.stderr == said
