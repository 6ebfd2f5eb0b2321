import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from orbit_jax.tasks.rows import PYARROW, read_rows
from orbit_jax.tasks.splits import DataFile, find_splits

ROWS = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(5)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def save_dataset(folder, shards, metadata=None, **state):
    """A folder as `Dataset.save_to_disk` of Hugging Face leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None} | state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def all_rows(files):
    return [row for file in files for row in read_rows(file)]


def columns(path):
    (files,) = find_splits(path).values()
    return [row.columns for row in all_rows(files)]


def names(splits):
    return {split: [file.name for file in files] for split, files in splits.items()}


def test_json_lines_json_and_parquet_give_the_same_rows(tmp_path):
    write(tmp_path / "a.jsonl", lines(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    write(tmp_path / "list.json", json.dumps(ROWS, indent=1))
    write(tmp_path / "lines.json", lines(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "list.json", "lines.json", "a.parquet"):
        assert columns(tmp_path / name) == ROWS, name


def test_a_json_file_of_one_object_is_one_row(tmp_path):
    path = write(tmp_path / "1.json", json.dumps(ROWS[0], indent=1))
    assert columns(path) == ROWS[:1]


def test_a_saved_dataset_is_read_with_all_its_shards_in_order(tmp_path):
    save_dataset(tmp_path / "d", [ROWS[:3], ROWS[3:]])
    assert columns(tmp_path / "d") == ROWS


def test_an_arrow_file_is_read_as_well_as_a_stream(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert columns(tmp_path / "a.arrow") == ROWS


def test_a_saved_dictionary_of_datasets_has_its_splits(tmp_path):
    save_dataset(tmp_path / "train", [ROWS[:3]])
    save_dataset(tmp_path / "dev", [ROWS[3:]])
    save_dataset(tmp_path / "few_shot", [ROWS[:1]])
    write(tmp_path / "dataset_dict.json", json.dumps({"splits": ["train", "dev", "few_shot"]}))
    splits = find_splits(tmp_path)
    assert list(splits) == ["train", "validation", "few_shot"]
    assert [row.columns for row in all_rows(splits["validation"])] == ROWS[3:]
    assert next(read_rows(splits["train"][0])).place == "train/data-00000-of-00001.arrow row 1"


def test_class_labels_are_read_by_their_names(tmp_path):
    labels = {"answer": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": labels}})}
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 0}, {"prompt": "c"}]
    save_dataset(tmp_path / "d", [rows], metadata)
    assert columns(tmp_path / "d") == [
        {"prompt": "a", "answer": "yes"},
        {"prompt": "b", "answer": "no"},
        {"prompt": "c"},
    ]


def test_files_of_a_folder_belong_to_the_split_that_their_name_gives(tmp_path):
    for name in ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.jsonl", lines(ROWS[:1]))
    write(tmp_path / "README.md", "")
    write(tmp_path / "dataset_infos.json", "{}")
    write(tmp_path / ".cache" / "test.jsonl", "")
    assert names(find_splits(tmp_path)) == {
        "test": ["data/test-00000-of-00001.jsonl"],
        "train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
    }


def test_a_folder_named_like_a_split_holds_all_of_it(tmp_path):
    write(tmp_path / "train" / "algebra" / "1.json", "{}")
    write(tmp_path / "train" / "geometry" / "1.json", "{}")
    write(tmp_path / "test" / "algebra" / "2.json", "{}")
    assert names(find_splits(tmp_path)) == {
        "test": ["test/algebra/2.json"],
        "train": ["train/algebra/1.json", "train/geometry/1.json"],
    }


def test_files_without_a_split_belong_together(tmp_path):
    write(tmp_path / "a.jsonl", "")
    write(tmp_path / "latest.jsonl", "")
    assert names(find_splits(tmp_path)) == {"": ["a.jsonl", "latest.jsonl"]}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train.jsonl", "more.jsonl"], r"more.jsonl belongs to none of the splits .*\(train\)"),
        (["main/train.jsonl", "other/train.jsonl"], "train files in main and in other"),
        (["train_test.jsonl"], "'train_test' names two splits, test and train"),
        (["a.csv"], "nothing to read; understood are files .jsonl"),
    ],
)
def test_a_folder_whose_splits_are_unclear_is_refused(tmp_path, files, message):
    for name in files:
        write(tmp_path / name, "")
    with pytest.raises(ValueError, match=message):
        find_splits(tmp_path)


def test_two_datasets_of_one_split_are_refused(tmp_path):
    write(tmp_path / "dataset_dict.json", json.dumps({"splits": ["train_sft", "train_prefs"]}))
    save_dataset(tmp_path / "train_sft", [ROWS])
    with pytest.raises(ValueError, match="train_sft and train_prefs are both train splits"):
        find_splits(tmp_path)


def test_saved_folders_that_cannot_be_read_rightly_are_refused(tmp_path):
    save_dataset(tmp_path / "d", [ROWS], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ValueError, match="as a selection of rows; load it and save it again"):
        find_splits(tmp_path / "d")
    save_dataset(tmp_path / "e", [ROWS])
    (tmp_path / "e" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"names data-00000-of-00001.arrow, not there"):
        find_splits(tmp_path / "e")
    write(tmp_path / "f" / "state.json", "{")
    with pytest.raises(ValueError, match="cannot be read or has no"):
        find_splits(tmp_path / "f")


def test_paths_of_nothing_known_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.jsonl does not exist"):
        find_splits(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"of no known form; understood are files .jsonl"):
        find_splits(write(tmp_path / "a.csv", ""))


def test_faulty_rows_come_with_their_places(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{bad\n7\n')
    rows = list(read_rows(DataFile(path, "a.jsonl")))
    assert [(row.place, row.id, row.fault) for row in rows] == [
        ("a.jsonl line 1", "a:1", ""),
        ("a.jsonl line 3", "a:3", "not valid JSON"),
        ("a.jsonl line 4", "a:4", "not a JSON object"),
    ]
    path = write(tmp_path / "a.json", '[{"a": 1}, 7]')
    rows = list(read_rows(DataFile(path, "a.json")))
    assert [(row.place, row.fault) for row in rows] == [
        ("a.json row 1", ""),
        ("a.json row 2", "not a JSON object"),
    ]


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path):
    for name, form in (("a.parquet", "Parquet"), ("a.arrow", "Arrow")):
        path = write(tmp_path / name, "text" * 100)
        with pytest.raises(ValueError, match=f"{name} cannot be read as {form}"):
            list(read_rows(DataFile(path, name)))
    path = write(tmp_path / "a.jsonl.gz", "text")
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_rows(DataFile(path, "a.jsonl.gz")))


def test_without_pyarrow_its_installation_is_named_and_json_still_works(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(tmp_path / "a.parquet", "")
    with pytest.raises(ValueError, match=r"takes the package pyarrow; run `pip install pyarrow=="):
        list(read_rows(DataFile(path, "a.parquet")))
    assert columns(write(tmp_path / "a.jsonl", lines(ROWS))) == ROWS


def test_the_pyarrow_that_messages_name_is_the_required_one():
    required = Path(__file__).parents[2] / "requirements-common.txt"
    assert PYARROW in required.read_text().splitlines()
