import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
OPTIONAL = {"pynvml": "nvidia-ml-py"}  # imported where it is installed, as with a GPU
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


def pins(name):
    """Package name -> version of one requirements file; its other lines must be known ones."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r ", "-e .")):
            package, version = re.fullmatch(r"([\w.\[\]-]+)==([\w.]+)", line).groups()
            package = normal(package.split("[")[0])
            assert package not in found, f"{name} names {package} twice"
            found[package] = version
    return found


def normal(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def imported(folder):
    """Top-level names that the folder's files import; rivals have environments of their own."""
    names = set()
    for path in {*(ROOT / folder).rglob("*.py")} - {*(ROOT / "experiments/rivals").iterdir()}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    return names


def test_a_version_is_written_once():
    common = pins("requirements-common.txt")
    for name in ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt"):
        assert not common.keys() & pins(name).keys()


def test_both_kinds_of_machine_get_the_same_jax_and_its_jaxlib():
    jax = {pins(name)["jax"] for name in ("requirements.txt", "requirements-cpu.txt")}
    assert jax == {pins("requirements-common.txt")["jaxlib"]}


def test_what_is_imported_where_it_is_installed_has_a_version_too():
    assert set(OPTIONAL.values()) <= pins("requirements.txt").keys()


@pytest.mark.parametrize("folder", ["orbit_jax", "experiments", "configs"])
def test_what_runs_import_is_required(folder):
    required = pins("requirements-common.txt") | pins("requirements-cpu.txt")
    packages = metadata.packages_distributions()
    local = {path.stem for path in (ROOT / folder).rglob("*")} | {"orbit_jax", "configs"}
    for name in imported(folder) - local - set(sys.stdlib_module_names) - OPTIONAL.keys():
        distributions = {normal(package) for package in packages.get(name, [name])}
        assert distributions & required.keys(), f"{folder} imports {name}: require its package"


def test_neither_runs_nor_tests_import_development_packages():
    development = {name.replace("-", "_") for name in pins("requirements-dev.txt")}
    tests = {folder.relative_to(ROOT) for folder in (ROOT / "tests").iterdir() if folder.is_dir()}
    for folder in {"orbit_jax", "experiments", "configs", *map(str, tests)} - {"tests/goldens"}:
        assert not imported(folder) & development


def test_the_makefile_has_every_promised_target():
    promised = "help setup demo smollm2 test lint goldens base gpu-check"
    assert set(promised.split()) <= TARGETS


def test_every_script_that_the_makefile_runs_is_there():
    scripts = re.findall(r"\S+/bin/python (\S+\.py)", MAKEFILE)
    assert len(scripts) == len(re.findall(r"/bin/python (?!-|\$)", MAKEFILE)) > 10
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "TROUBLESHOOTING.md"])
def test_every_make_command_that_people_are_told_exists(name):
    commands = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", (ROOT / name).read_text(), re.MULTILINE))
    assert commands
    assert commands <= TARGETS


def test_every_file_that_contributors_are_told_of_exists():
    names = set(re.findall(r"`([a-z_]+/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(names) > 20
    known = (ROOT, ROOT / "orbit_jax")  # the tables name files of the package without it
    assert [name for name in names if not any((top / name).exists() for top in known)] == []


def test_the_python_that_make_asks_for_is_the_one_that_the_package_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = re.search(r"version_info < \((\d+), (\d+)\)", MAKEFILE).groups()
    assert project["requires-python"] == f">={major}.{minor}"


def test_the_licence_is_the_one_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "LICENSE").read_text()
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License\n" in text
    assert "Version 2.0" in text
    assert "Copyright 2026 The orbit_jax authors" in text
    assert text.rstrip().endswith("limitations under the License.")


def test_continuous_integration_is_executable_and_ends_with_the_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().endswith("make test")
