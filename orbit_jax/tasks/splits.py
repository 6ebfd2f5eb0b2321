"""The files of a data set, by split.

A folder may hold the splits that `DatasetDict.save_to_disk` of Hugging Face wrote, files such as
`train.jsonl` and `test-00000-of-00002.parquet`, or folders `train` and `test` with files below
them.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "heldout": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_FORMS = f"files {', '.join(_SUFFIXES)} (JSON also as .gz) or a folder that save_to_disk wrote"


@dataclass(frozen=True)
class DataFile:
    """A file with rows; `name` is its path below what was asked for, for places and ids."""

    path: Path
    name: str


def find_splits(where: str | Path) -> dict[str, list[DataFile]]:
    """Return the files of each split, in order; all under the name "" when no split is given.

    Names are those of `SPLIT_NAMES`' values, and of other splits of a DatasetDict as they are.

    Raises:
        ValueError: when there is nothing to read, or which file belongs to which split is unclear.
    """
    where = Path(where)
    if where.is_file():
        if not data_suffix(where):
            raise ValueError(f"data file {where} is of no known form; understood are {_FORMS}.")
        return {"": [DataFile(where, where.name)]}
    if not where.is_dir():
        raise ValueError(f"data {where} does not exist; give the path of {_FORMS}.")
    if (where / "dataset_dict.json").is_file():
        return _splits_of_dataset_dict(where)
    if (where / "state.json").is_file():
        return {"": _arrow_files(where, where)}
    return _splits_of_folder(where)


def split_name(name: str) -> str:
    """Return the split that a file's or split's name names by one of its parts, "" for none.

    `train-00000-of-00002` and `gsm8k_train` are train, `dev` is validation.

    Raises:
        ValueError: when it names two.
    """
    found = {SPLIT_NAMES[p] for p in re.split(r"[-_. ]", name.lower()) if p in SPLIT_NAMES}
    if len(found) > 1:
        raise ValueError(
            f"data {name!r} names two splits, {' and '.join(sorted(found))}; name one."
        )
    return found.pop() if found else ""


def data_suffix(path: Path) -> str:
    """Return the known suffix of a data file, without `.gz`; "" for other files."""
    name = path.name.lower()
    zipped = name.endswith(".gz")
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in _SUFFIXES and not (zipped and "j" not in suffix) else ""


def _splits_of_dataset_dict(where: Path) -> dict[str, list[DataFile]]:
    splits: dict[str, list[DataFile]] = {}
    names: dict[str, str] = {}
    for name in _read_description(where / "dataset_dict.json", "splits"):
        split = split_name(name) or name
        if split in names:
            raise ValueError(
                f"data {where}: {names[split]} and {name} are both {split} splits; give the folder "
                "of each split that is meant."
            )
        names[split] = name
        splits[split] = _arrow_files(where / name, where)
    return splits


def _arrow_files(folder: Path, root: Path) -> list[DataFile]:
    """The files of one saved Dataset in their order."""
    if _read_description(folder / "state.json", "_indices_data_files", ()):
        raise ValueError(
            f"data {folder} was saved by an old `datasets` as a selection of rows; load it and "
            "save it again with a newer version."
        )
    names = [entry["filename"] for entry in _read_description(folder / "state.json", "_data_files")]
    files = [DataFile(folder / name, str((folder / name).relative_to(root))) for name in names]
    for file in files:
        if not file.path.is_file():
            raise ValueError(f"data {folder}: its state.json names {file.path.name}, not there.")
    return files


def _read_description(path: Path, key: str, default: Any = None) -> Any:
    try:
        value = json.loads(path.read_text())
        return value[key] if default is None else value.get(key, default)
    except (OSError, ValueError, KeyError, AttributeError):
        raise ValueError(
            f"data: {path} cannot be read or has no {key!r}; save the dataset again."
        ) from None


def _splits_of_folder(where: Path) -> dict[str, list[DataFile]]:
    """The files below a folder by the split that their name, or their first folder's, gives."""
    files = [
        DataFile(path, path.relative_to(where).as_posix())
        for path in sorted(where.rglob("*"))
        if path.is_file()
        and data_suffix(path)
        and path.name not in _DESCRIPTIONS
        and not any(part.startswith(".") for part in path.relative_to(where).parts)
    ]
    if not files:
        raise ValueError(f"data folder {where} holds nothing to read; understood are {_FORMS}.")
    splits: dict[str, list[DataFile]] = {}
    named_at: dict[str, Path] = {}
    for file in files:
        first, *below = Path(file.name).parts
        split = split_name(first) if below else ""
        if not split:
            split = split_name(file.path.name.split(".")[0])
            at = named_at.setdefault(split, file.path.parent)
            if split and at != file.path.parent:
                raise ValueError(
                    f"data folder {where} has {split} files in {at.relative_to(where)} and in "
                    f"{file.path.parent.relative_to(where)}; give the folder that is meant."
                )
        splits.setdefault(split, []).append(file)
    if len(splits) > 1 and "" in splits:
        raise ValueError(
            f"data folder {where}: {splits[''][0].name} belongs to none of the splits that other "
            f"files name ({', '.join(sorted(set(splits) - {''}))}); rename it or move it away."
        )
    return splits
