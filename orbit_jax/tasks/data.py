"""A task's examples from data on disk: read, checked against each other, split, and hashed.

Bad rows are told with their places, up to a limit. An example whose prompt occurred before in its
split is left out; so is one to train on whose prompt is in another split. What was left out is in
the report.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orbit_jax.tasks import families
from orbit_jax.tasks.layouts import recognise
from orbit_jax.tasks.problems import is_heldout, normalise_prompt
from orbit_jax.tasks.rows import read_rows
from orbit_jax.tasks.splits import DataFile, find_splits, split_name
from orbit_jax.tasks.task import Example

NAMED_IDS = 5  # of what was left out, in the lines of a report

Splits = Mapping[str, tuple[Example, ...]]


@dataclass(frozen=True)
class DataReport:
    """What was found while reading.

    Attributes:
      layouts: of each split, by its name in the data.
      bad_rows: place and reason of each row that was left out.
      duplicates: ids of examples left out, since their split has the prompt before.
      contradictions: those of the duplicates whose answer or tests differ from the first's.
      overlap: ids of examples not trained on, since another split has the prompt.
    """

    layouts: Mapping[str, str]
    bad_rows: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    overlap: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report in sentences, one a line; nothing is said of what is in order."""
        found = [f"{name or 'all rows'}: {layout}" for name, layout in self.layouts.items()]
        lines = [f"read as {', '.join(found)}"]
        if self.bad_rows:
            lines.append(f"{len(self.bad_rows)} bad rows left out: {'; '.join(self.bad_rows)}")
        for ids, what in (
            (self.duplicates, "have a prompt of their split again and were left out"),
            (self.contradictions, "of these have another answer than the first"),
            (self.overlap, "were not trained on, since another split has their prompt"),
        ):
            if ids:
                more = ", ..." if len(ids) > NAMED_IDS else ""
                lines.append(f"{len(ids)} {what}: {', '.join(ids[:NAMED_IDS])}{more}")
        return lines


@dataclass(frozen=True)
class Data:
    """Examples by split: `train`, `heldout`, and others that the data have; and the report."""

    splits: Splits
    report: DataReport

    @functools.cached_property
    def content_hash(self) -> str:
        """Changes with any id, prompt, answer, task or test, and with the order of examples."""
        return content_hash(self.splits)


def load_examples(
    where: str | Path | Mapping[str, str | Path],
    columns: Mapping[str, str] | None = None,
    task: str = "math",
    max_bad_rows: int = 20,
) -> Data:
    """Return the examples of a file or folder, or of a generated family.

    The splits are those of the data: `test` is `heldout`, or `validation` where there is no test.
    Where none is held out, one prompt in ten is, by its text (`is_heldout`).

    Args:
        where: path of a file or folder (see `splits`), `reasoning_gym:chain_sum?size=500` (see
            `families`), or split names with a path each.
        columns: names the columns `prompt` and `answer` where the layout is not to be guessed.
        task: of examples that are not programs; those are of task `code`.
        max_bad_rows: more than so many are refused.

    Raises:
        ValueError: when the data cannot be read or understood, hold too many bad rows, or leave
            nothing to hold out or to train on after the split by text.
    """
    if isinstance(where, str) and where.startswith(families.PREFIX):
        given = {"": families.generate(where)}
        report = DataReport({"": where})
    else:
        given, report = _read(where, columns or {}, task, max_bad_rows)
    duplicates: list[str] = []
    contradictions: list[str] = []
    distinct = {
        name: _distinct(examples, duplicates, contradictions) for name, examples in given.items()
    }
    splits, overlap = _without_overlap(_with_heldout(distinct, where))
    left_out = dict(
        duplicates=tuple(duplicates), contradictions=tuple(contradictions), overlap=overlap
    )
    return Data(splits, replace(report, **left_out))


def content_hash(splits: Splits) -> str:
    """Return a hash of all that tasks are made of; for the check that a resumed run has its data.

    Ids, prompts, answers, tasks and tests count, and the order of the examples; what else a row
    holds does not.
    """
    digest = hashlib.sha256()
    for name in sorted(splits):
        for e in splits[name]:
            parts = [name, e.id, e.prompt, e.answer, e.task, e.extra.get("tests")]
            digest.update(json.dumps(parts, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def prompt_key(prompt: str | tuple[dict[str, str], ...]) -> str:
    """Return what two forms of one prompt share: a lone user message is as good as its text."""
    if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0]["role"] == "user":
        prompt = prompt[0]["content"]
    return normalise_prompt(prompt)


def _read(
    where: str | Path | Mapping[str, str | Path],
    columns: Mapping[str, str],
    task: str,
    max_bad_rows: int,
) -> tuple[dict[str, list[Example]], DataReport]:
    files = _files_by_split(where)
    examples: dict[str, list[Example]] = {}
    layouts: dict[str, str] = {}
    faults: list[str] = []
    for name, of_split in files.items():
        rows = [row for file in of_split for row in read_rows(file)]
        found = [row.columns for row in rows if row.columns is not None]
        if found:
            place = f"{where}, split {name}" if name else str(where)
            layout = recognise(found, columns, task, place)
            layouts[name] = layout.name
        examples[name] = []
        for row in rows:
            try:
                if row.columns is None:
                    raise ValueError(row.fault)
                examples[name].append(layout.read(row.columns, row.id))
            except ValueError as error:
                faults.append(f"{row.place}: {error}")
    named = "; ".join(faults[: max(max_bad_rows, 1)])
    if len(faults) > max_bad_rows:
        more = len(faults) - max(max_bad_rows, 1)
        raise ValueError(
            f"data {where} have {len(faults)} bad rows, more than max_bad_rows={max_bad_rows}; "
            f"correct or remove them: {named}" + (f"; and {more} more." if more > 0 else ".")
        )
    if not any(examples.values()):
        raise ValueError(
            f"data {where} hold no examples; they need at least one row"
            + (f" that can be read: {named}." if faults else ".")
        )
    return examples, DataReport(layouts, tuple(faults))


def _files_by_split(
    where: str | Path | Mapping[str, str | Path],
) -> dict[str, list[DataFile]]:
    if not isinstance(where, Mapping):
        return find_splits(where)
    files: dict[str, list[DataFile]] = {}
    for name, path in where.items():
        split, found = split_name(name) or name, find_splits(path)
        if split in files:
            raise ValueError(f"data {dict(where)}: {name!r} is {split} again; name other splits.")
        if len(found) > 1:
            raise ValueError(
                f"data {path}, given for {name!r}, have splits of their own "
                f"({', '.join(sorted(found))}); give the file or folder of one."
            )
        # The name goes before: files of two folders may be named alike, ids may not.
        files[split] = [
            DataFile(file.path, f"{name}/{file.name}") for part in found.values() for file in part
        ]
    return files


def _distinct(
    examples: Sequence[Example], duplicates: list[str], contradictions: list[str]
) -> tuple[Example, ...]:
    """The first example of each prompt; ids of the others are added to the lists."""
    first: dict[str, Example] = {}
    for example in examples:
        before = first.setdefault(prompt_key(example.prompt), example)
        if before is not example:
            duplicates.append(example.id)
            if _reference(before) != _reference(example):
                contradictions.append(example.id)
    return tuple(first.values())


def _reference(example: Example) -> tuple:
    return example.task, example.answer.strip(), example.extra.get("tests")


def _with_heldout(splits: dict[str, tuple[Example, ...]], where: object) -> Splits:
    """The splits under the names that tasks use; some held out where the data hold out none."""
    rest = {name: examples for name, examples in splits.items() if name not in ("", "train")}
    train = splits.get("", ()) + splits.get("train", ())
    for name in ("test", "validation"):
        if name in rest:
            return {"train": train, "heldout": rest.pop(name), **rest}
    if not train:
        raise ValueError(
            f"data {where} have the splits {', '.join(rest)}, none of which is train or test; say "
            "which is which, as in {'train': path, 'test': path}."
        )
    parts = {side: tuple(e for e in train if is_heldout(e.prompt) == side) for side in (0, 1)}
    if not parts[0] or not parts[1]:
        raise ValueError(
            f"data {where}: {len(train)} examples split into {len(parts[0])} train and "
            f"{len(parts[1])} held-out ones; add examples until both parts have some, or give a "
            "test split."
        )
    return {"train": parts[0], "heldout": parts[1], **rest}


def _without_overlap(splits: Splits) -> tuple[Splits, tuple[str, ...]]:
    others = {
        prompt_key(e.prompt)
        for name, of_split in splits.items()
        if name != "train"
        for e in of_split
    }
    train = splits["train"]
    overlap = tuple(e.id for e in train if prompt_key(e.prompt) in others)
    kept = tuple(e for e in train if prompt_key(e.prompt) not in others)
    return {**splits, "train": kept}, overlap
