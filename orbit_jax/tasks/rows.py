"""Rows of data files: JSON Lines, JSON, Parquet, and the Arrow files of Hugging Face `datasets`.

Parquet and Arrow take pyarrow, which is imported only when such a file is read.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from orbit_jax.tasks.splits import DataFile, data_suffix

PYARROW = "pyarrow==26.0.1"


@dataclass(frozen=True)
class Row:
    """One row: its columns without empty ones, or None and the fault that it has.

    `place` says where it stands (`train.jsonl line 3`), `id` the same in short (`train:3`).
    """

    place: str
    id: str
    columns: dict[str, Any] | None
    fault: str = ""


def read_rows(file: DataFile) -> Iterator[Row]:
    """Yield the file's rows; a row that cannot be read is yielded with its fault.

    Raises:
        ValueError: when the file as a whole cannot be read, or takes a package that is missing.
    """
    suffix = data_suffix(file.path)
    stem = file.name.removesuffix(".gz").removesuffix(suffix)
    word, values = {
        ".json": _json_document,
        ".parquet": _parquet,
        ".arrow": _arrow,
    }.get(suffix, _json_lines)(file.path)
    for number, value in values:
        place, row_id = f"{file.name} {word} {number}", f"{stem}:{number}"
        if isinstance(value, str):
            yield Row(place, row_id, None, value)
        else:
            yield Row(place, row_id, {k: v for k, v in value.items() if v is not None})


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; decimals are `Decimal`, which keeps them as written.

    Raises:
        ValueError: says in a few words what is wrong with the line.
    """
    value = _parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _parse_json(text: bytes) -> Any:
    try:
        # Decimal keeps a numeric answer as it was written: 0.1 is not a binary fraction.
        value = json.loads(text.decode("utf-8-sig"), parse_float=Decimal)
        json.dumps(value, default=str, ensure_ascii=False).encode()  # half a surrogate is no text
    except UnicodeError:
        raise ValueError("not UTF-8 text") from None
    except (json.JSONDecodeError, RecursionError, ArithmeticError):
        raise ValueError("not valid JSON") from None
    return value


# A reader returns what the rows of a file are called, and pairs of a number and a row or its fault.


def _json_lines(path: Path) -> tuple[str, Iterator[tuple[int, dict | str]]]:
    return "line", _lines(path)


def _lines(path: Path) -> Iterator[tuple[int, dict | str]]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object_or_fault(line)
    except (OSError, EOFError) as error:
        raise ValueError(f"data file {path} cannot be read: {error}.") from None


def _object_or_fault(line: bytes) -> dict | str:
    try:
        return parse_object(line)
    except ValueError as error:
        return str(error)


def _json_document(path: Path) -> tuple[str, Iterator[tuple[int, dict | str]]]:
    """A list of objects, or one object; what is neither is read as JSON Lines."""
    lines = list(_lines(path))
    if all(isinstance(value, dict) for _, value in lines):
        return "line", iter(lines)
    with _open(path) as file:
        try:
            value = _parse_json(file.read())
        except ValueError:
            return "line", iter(lines)
    rows = value if isinstance(value, list) else [value]
    return "row", enumerate((r if isinstance(r, dict) else "not a JSON object" for r in rows), 1)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parquet(path: Path) -> tuple[str, Iterator[tuple[int, dict | str]]]:
    return "row", _arrow_rows(path, "Parquet")


def _arrow(path: Path) -> tuple[str, Iterator[tuple[int, dict | str]]]:
    return "row", _arrow_rows(path, "Arrow")


def _arrow_rows(path: Path, form: str) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"data file {path} takes the package pyarrow; run `pip install {PYARROW}`, or give "
            "the data as JSON Lines."
        ) from None
    number = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            if form == "Parquet":
                reader = pyarrow.parquet.ParquetFile(source)
                schema, batches = reader.schema_arrow, reader.iter_batches()
            elif source.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                schema = reader.schema
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                source.seek(0)
                batches = pyarrow.ipc.open_stream(source)
                schema = batches.schema
            labels = _class_labels(schema)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, row | {k: labels[k].get(row[k]) for k in labels if k in row}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"data file {path} cannot be read as {form}: {reason}.") from None


def _class_labels(schema: Any) -> dict[str, dict[int, str]]:
    """Names behind the numbers of columns that `datasets` marked as class labels."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return {
        column: dict(enumerate(feature["names"]))
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }
