"""Safetensors headers, maps and errors, checked against the safetensors package."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from orbit_jax.checkpoint.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    open_checkpoint,
    open_file,
    write_safetensors,
)

TENSORS = {
    "byte": np.arange(3, dtype=np.uint8),
    "brain": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "half": np.arange(4, dtype=np.float16).reshape(2, 2).T,
    "words": np.arange(-4, 4, dtype=np.int32).reshape(2, 4),
    "shape": np.array([5, 7]),
    "scalar": np.float32(3.5).reshape(()),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / SINGLE_FILE, TENSORS, {"format": "pt"})
    return tmp_path


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def test_what_is_written_reads_back_the_same(folder: Path):
    refs = open_checkpoint(folder)
    assert refs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (refs[name].dtype, refs[name].shape) == (tensor.dtype, tensor.shape)
        assert refs[name].nbytes == tensor.nbytes
        assert equal(refs[name].map(), tensor)


def test_the_safetensors_package_reads_what_is_written(folder: Path):
    theirs = safetensors.numpy.load_file(folder / SINGLE_FILE)
    assert theirs.keys() == TENSORS.keys()
    assert all(equal(theirs[name], TENSORS[name]) for name in TENSORS)


def test_files_of_the_safetensors_package_are_read(tmp_path: Path):
    tensors = {name: np.array(tensor, order="C") for name, tensor in TENSORS.items()}
    safetensors.numpy.save_file(tensors, tmp_path / SINGLE_FILE)
    refs = open_checkpoint(tmp_path)
    assert all(equal(refs[name].map(), TENSORS[name]) for name in TENSORS)


def test_equal_tensors_give_equal_files(folder: Path):
    write_safetensors(folder / "b", dict(reversed(TENSORS.items())), {"format": "pt"})
    assert (folder / "b").read_bytes() == (folder / SINGLE_FILE).read_bytes()


def test_a_map_cannot_change_the_file(folder: Path):
    with pytest.raises(ValueError, match="read-only"):
        open_checkpoint(folder)["byte"].map()[0] = 1


def shard(folder: Path) -> None:
    """Splits the tensors over two files with an index."""
    (folder / SINGLE_FILE).unlink()
    weight_map = {}
    for i, name in enumerate(TENSORS):
        file = f"model-0000{i % 2 + 1}-of-00002.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        part = {name: TENSORS[name] for name in TENSORS if weight_map[name] == file}
        write_safetensors(folder / file, part)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_read_as_one_checkpoint(folder: Path):
    shard(folder)
    refs = open_checkpoint(folder)
    assert all(equal(refs[name].map(), TENSORS[name]) for name in TENSORS)


def test_a_missing_folder_file_or_shard_is_named(folder: Path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_checkpoint(folder / "nowhere")
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is missing and model"):
        open_checkpoint(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing and there is no"):
        open_checkpoint(folder)


def test_an_index_that_contradicts_its_shards_is_refused(folder: Path):
    shard(folder)
    first = folder / "model-00001-of-00002.safetensors"
    write_safetensors(first, {"byte": TENSORS["byte"]})
    with pytest.raises(ValueError, match="half is not in model-00001"):
        open_checkpoint(folder)
    write_safetensors(first, TENSORS)
    with pytest.raises(ValueError, match=r"stands in both .*: remove one"):
        open_checkpoint(folder)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        open_checkpoint(folder)
    (folder / INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        open_checkpoint(folder)


def test_a_truncated_file_is_refused_wherever_it_ends(folder: Path):
    path = folder / SINGLE_FILE
    whole = path.read_bytes()
    for kept, message in [(4, "fewer than its header"), (40, "fewer than its"), (-1, "truncated")]:
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=message):
            open_file(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F3", "shape": [2], "data_offsets": [0, 2]}, "x has the unknown dtype F3"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 2]}, r"x of float32\[2\] needs 8"),
        ({"dtype": "F32"}, "no safetensors header"),
        ([], "no safetensors header"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, entry: object, message: str):
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=message):
        open_file(tmp_path / "x")


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    for text in (b"[1]", b"\xff\xff", b"GGUF"):
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match="no safetensors header"):
            open_file(tmp_path / "x")
    with pytest.raises(ValueError, match="y is missing"):
        open_file(tmp_path / "y")


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="x: dtype complex64 cannot be written"):
        write_safetensors(tmp_path / "x", {"x": np.zeros(1, np.complex64)})
