"""The header of a GGUF file, and files that are not whole."""

import struct
from pathlib import Path

import pytest
from gguf_writer import write_gguf

from orbit_jax.checkpoint.base import load_base
from orbit_jax.checkpoint.gguf_file import is_gguf, open_gguf

SIMPLE = Path(__file__).parents[1] / "goldens/gguf/simple.gguf"
F32 = 0


def test_values_of_every_kind_are_read(tmp_path: Path):
    values = {"a": 7, "b": -0.5, "c": True, "d": "ä\n", "e": ["", "x y"], "f": [3, -4]}
    file = open_gguf(write_gguf(tmp_path / "a.gguf", values))
    assert file.metadata == values
    assert file.tensors == {}


def test_tensors_lie_where_the_alignment_puts_them(tmp_path: Path):
    data = struct.pack("<6f", *range(6))
    metadata = {"pad": "x" * 5, "general.alignment": 32}
    tensors = {"a": (F32, [3], data[:12]), "b": (F32, [3, 2], data)}
    file = open_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    b = file.tensors["b"]
    assert (b.shape, b.nbytes, b.type.name) == ((2, 3), 24, "F32")
    assert b.map().tobytes() == data
    assert file.tensors["a"].map().tobytes() == data[:12]


def test_a_file_is_told_from_a_folder(tmp_path: Path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "weights").write_bytes(b"")
    assert is_gguf("nowhere/model.gguf")
    assert is_gguf(tmp_path / "weights")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf("nowhere/model")


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path):
    whole = SIMPLE.read_bytes()
    path = tmp_path / "cut.gguf"
    sizes = [4, 8, 20, 30, 300, 5000, open_gguf(SIMPLE).tensors["output.weight"].start]
    for size in [*sizes, len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"cut.gguf has {size} .*download it again"):
            load_base(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file: give a .gguf file or a Hugging Face folder"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "a big-endian file reads as a large one"),
        (
            b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 13) + bytes(8),
            "the value type 13 at byte 37 is unknown",
        ),
        (
            b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"\xff", 4) + bytes(8),
            "the text at byte 32 is not UTF-8",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<QcII", 1, b"k", 4, 1) * 2,
            "the metadata k stands twice",
        ),
    ],
)
def test_a_broken_header_is_named(data: bytes, message: str, tmp_path: Path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("kind", "widths", "message"),
    [
        (13, [256], "w has the type Q5_K, which is not supported: .* F32, F16, Q4_0"),
        (99, [256], "w has the type 99, which is not supported"),
        (2, [48, 4], r"w of shape \[4, 48\] does not consist of Q4_0 blocks of 32"),
        (0, [], r"w of shape \[\] does not consist"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_named(
    kind: int, widths: list[int], message: str, tmp_path: Path
):
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": (kind, widths, bytes(64))})
    with pytest.raises(ValueError, match=message):
        open_gguf(path)


def test_missing_files_and_repeated_tensors_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.gguf is missing: check the path"):
        load_base(tmp_path / "none.gguf")
    names = {"w1": (F32, [4], bytes(16)), "w2": (F32, [4], bytes(16))}
    path = write_gguf(tmp_path / "a.gguf", {}, names)
    path.write_bytes(path.read_bytes().replace(b"w2", b"w1"))
    with pytest.raises(ValueError, match="the tensor w1 stands twice"):
        open_gguf(path)
    path = write_gguf(tmp_path / "a.gguf", {"general.alignment": 0})
    with pytest.raises(ValueError, match=r"general\.alignment=0 must be a positive number"):
        open_gguf(path)
