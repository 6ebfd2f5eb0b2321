import json

import jax.numpy as jnp
import pytest
from matplotlib.image import imread
from tensorboardX.proto.event_pb2 import Event, SessionLog

from orbit_jax.runs.metrics import MetricsWriter, read_metrics
from orbit_jax.runs.plots import learning_curve
from orbit_jax.runs.sample_text import MOST_CHARACTERS, as_texts


def events(folder):
    """Every TensorBoard event of a run, in the order of writing."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # a record is: length (8 bytes), its checksum (4), the event, its checksum (4)
            length = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_rows_are_read_back_as_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward/mean": 0.25, "count": jnp.int32(3)})
        writer.write(1, {"reward/mean": jnp.float32(0.5), "note": "text"})
    assert read_metrics(tmp_path) == [
        {"step": 0, "reward/mean": 0.25, "count": 3},
        {"step": 1, "reward/mean": 0.5, "note": "text"},
    ]


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1.0})
        assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), jnp.float32("-inf")])
def test_values_that_are_not_finite_become_null(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": value, "b": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 0, "a": None, "b": 1.0}


def test_a_resumed_run_has_each_step_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, {"a": float(step)})
    with MetricsWriter(tmp_path, read_metrics(tmp_path)[:3]) as writer:
        for step in range(3, 6):
            writer.write(step, {"a": 10.0 + step})
    assert [row["a"] for row in read_metrics(tmp_path)] == [0, 1, 2, 13, 14, 15]


def test_rows_of_a_resumed_run_equal_those_of_one_run(tmp_path):
    values = [0.1 + 0.2, 1e-7, 123456.789, 3.0]
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    with MetricsWriter(tmp_path / "whole") as writer:
        for step, value in enumerate(values):
            writer.write(step, {"a": value})
    for start, stop in ((0, 3), (2, 4)):
        kept = read_metrics(tmp_path / "resumed")[:start]
        with MetricsWriter(tmp_path / "resumed", kept) as writer:
            for step in range(start, stop):
                writer.write(step, {"a": values[step]})
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_what_stands_behind_a_broken_line_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 0}]


def test_a_row_that_the_disk_does_not_take_is_an_error_not_a_wait(tmp_path, monkeypatch):
    """The events' file as on a full disk; tensorboardX's own writer would wait for ever."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1.0})
        full = open("/dev/full", "wb")  # noqa: SIM115 (closed with the writer)
        monkeypatch.setattr(writer._events._file._py_recordio_writer, "_writer", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(1, {"a": 1.0})
        monkeypatch.undo()
        full.raw.close()


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a": 2')
    assert read_metrics(tmp_path) == [{"step": 0, "a": 1.0}]
    with MetricsWriter(tmp_path, read_metrics(tmp_path)) as writer:
        writer.write(1, {"a": 3.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]


def test_a_folder_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"reward/mean": 0.5, "bad": float("nan"), "note": "text"})
    scalars = [(e.step, v.tag, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert scalars == [(7, "reward/mean", 0.5)]


def test_tensorboard_gets_texts(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.text(7, "samples/best", "    1+1 = 2 ü")
    (found,) = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
    assert (found[0], found[1].tag) == (7, "samples/best/text_summary")
    assert found[1].metadata.plugin_data.plugin_name == "text"
    assert found[1].tensor.string_val == ["    1+1 = 2 ü".encode()]


def test_tensorboard_gets_pictures_as_they_are(tmp_path):
    learning_curve({"seed 0": [{"step": 1, "reward/mean": 0.5}]}, tmp_path / "curve.png")
    with MetricsWriter(tmp_path) as writer:
        writer.picture(7, "learning_curve", tmp_path / "curve.png")
    (found,) = [v for e in events(tmp_path) for v in e.summary.value]
    height, width, _ = imread(tmp_path / "curve.png").shape
    assert (found.tag, found.image.height, found.image.width) == ("learning_curve", height, width)
    assert found.image.encoded_image_string == (tmp_path / "curve.png").read_bytes()


def test_a_step_with_samples_however_long_costs_the_events_some_kilobytes(tmp_path):
    long = {"prompt": "p" * 10**6, "turns": [["assistant", "x" * 10**6]], "outcome": "scored"}
    texts = as_texts([long | {"reward": 0.0}, long | {"reward": 1.0}])
    with MetricsWriter(tmp_path) as writer:
        for name, text in texts.items():
            writer.text(7, name, text)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert 2 * MOST_CHARACTERS < path.stat().st_size < 2.2 * MOST_CHARACTERS


def test_tensorboard_is_told_which_steps_a_resume_replaces(tmp_path):
    for start in (0, 3):
        with MetricsWriter(tmp_path, [{"step": i} for i in range(start)]) as writer:
            writer.write(start, {"a": 1.0})
    starts = [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts == [3]
