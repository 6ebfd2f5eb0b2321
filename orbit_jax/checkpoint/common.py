"""What readers and writers of checkpoints share: digests, lists cut short, tokenizer files."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

# What a folder of other weights of the same model keeps: not its description.
_KEPT = ("tokenizer*", "vocab*", "merges.txt", "*tokens*.json", "chat_template*", "*.model", "*.py")
_KEPT += ("generation_config.json",)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def few(names: Iterable[str], most: int = 6) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files, and the code that a model may come with."""
    for path in (path for pattern in _KEPT for path in source.glob(pattern)):
        shutil.copyfile(path, target / path.name)
