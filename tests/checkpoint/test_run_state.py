import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from orbit_jax.checkpoint import run_state

ROOT = Path(__file__).parents[2]
CPU_ONLY = {"JAX_PLATFORMS": "cpu"}
FACTS = {"data_cursor": 40, "base_hash": "ab12", "adapter_version": 4}


class Moments(NamedTuple):
    mu: dict
    count: jax.Array
    empty: tuple = ()


def state(seed=0):
    """A tree of every stored type, with containers that optax and flax use."""
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = {
        "layers": {"q_proj": {"a": jax.random.normal(keys[0], (3, 4, 8))}},
        "mlp.gate/x": jax.random.normal(keys[1], (5,)).astype(jnp.bfloat16),
    }
    return {
        "adapter": weights,
        "moments": (Moments(jax.tree.map(jnp.ones_like, weights), jnp.int32(3)), None),
        "key": jax.random.key_data(keys[2]),
        "codes": jnp.arange(16, dtype=jnp.uint8),
        "odd": jnp.array([-0.0, jnp.nan, jnp.inf, 1e-45]),
        "negative_zero": jnp.full((4,), -0.0, jnp.bfloat16),
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def bits(tree):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def test_a_state_comes_back_bit_for_bit(tmp_path):
    tree = state()
    path = run_state.save(tmp_path, 12, tree, FACTS, keep_last=2)
    assert path.name == "step_000012"
    back, facts = run_state.restore(path, abstract(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert bits(back) == bits(tree)
    assert facts == {"step": 12, **FACTS}


def test_arrays_are_placed_by_the_sharding_that_is_asked_for(tmp_path):
    tree = {"w": jnp.arange(8.0), "v": jnp.arange(3)}
    path = run_state.save(tmp_path, 1, tree, {}, keep_last=1)
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("tensor"))
    wanted = abstract(tree) | {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    back, _ = run_state.restore(path, wanted)
    assert back["w"].sharding == sharding
    assert back["v"].sharding == SingleDeviceSharding(jax.local_devices()[0])
    assert bits(back) == bits(tree)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 1000000):
        run_state.save(tmp_path, step, {"a": jnp.ones(2)}, {}, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000"]
    assert run_state.latest(tmp_path) == (tmp_path / "step_1000000", [])


def test_an_empty_folder_has_no_latest(tmp_path):
    assert run_state.latest(tmp_path) == (None, [])


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    run_state.save(tmp_path, 3, {"a": jnp.zeros(2)}, FACTS, keep_last=2)
    path = run_state.save(tmp_path, 3, {"a": jnp.ones(2)}, FACTS | {"data_cursor": 8}, keep_last=2)
    back, facts = run_state.restore(path, {"a": jnp.zeros(2)})
    assert (float(back["a"].sum()), facts["data_cursor"]) == (2.0, 8)
    assert run_state.latest(tmp_path) == (path, [])


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step, quality in ((1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.1), (6, 0.3), (7, None)):
        run_state.save(tmp_path, step, {"a": jnp.ones(2)}, {}, keep_last=2, quality=quality)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_00000{i}" for i in (4, 6, 7)]
    assert run_state.best(tmp_path).name == "step_000004"
    assert run_state.latest(tmp_path).path.name == "step_000007"


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zeroed(file: Path) -> None:
    """As a loss of power leaves a file whose size was written and whose content was not."""
    file.write_bytes(bytes(file.stat().st_size))


def largest(path: Path) -> Path:
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


@pytest.mark.parametrize("damage", [cut, zeroed, Path.unlink])
@pytest.mark.parametrize("which", ["state", "manifest"])
def test_a_checkpoint_that_lost_bytes_is_passed_over_and_named(tmp_path, damage, which):
    whole = run_state.save(tmp_path, 4, {"a": jnp.ones(2)}, {}, keep_last=3)
    path = run_state.save(tmp_path, 8, {"a": jnp.arange(512.0)}, {}, keep_last=3)
    damage(path / "files.json" if which == "manifest" else largest(path / "state"))
    assert run_state.latest(tmp_path) == (whole, ["step_000008"])
    again = run_state.save(tmp_path, 8, {"a": jnp.arange(512.0)}, {}, keep_last=3)
    assert run_state.latest(tmp_path) == (again, [])


def test_further_files_are_part_of_a_checkpoint_and_of_what_makes_it_whole(tmp_path):
    files = {"metrics.jsonl": b'{"step": 4}\n'}
    path = run_state.save(tmp_path, 4, {"a": jnp.ones(2)}, {}, keep_last=1, files=files)
    assert (path / "metrics.jsonl").read_bytes() == files["metrics.jsonl"]
    assert run_state.latest(tmp_path).path == path
    cut(path / "metrics.jsonl")
    assert run_state.latest(tmp_path) == (None, ["step_000004"])


def test_arrays_of_a_checkpoint_are_read_by_name(tmp_path):
    path = run_state.save(tmp_path, 1, {"a": {"b": jnp.arange(3)}}, {}, keep_last=1)
    (stored,) = run_state.stored_arrays(path).items()
    assert stored[0] == "['a']['b']"
    assert stored[1].tolist() == [0, 1, 2]


def test_a_state_is_written_while_the_run_goes_on_with_its_memory(tmp_path, monkeypatch):
    """What the copy must guard against: the arrays are donated before the thread has read them."""
    begin = threading.Event()
    write = run_state._write
    monkeypatch.setattr(run_state, "_write", lambda *a: begin.wait(60) and write(*a))
    saver = run_state.Saver(tmp_path, keep_last=2)
    x = jnp.arange(1024.0)
    saver.save(1, {"a": x}, {})
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    jax.block_until_ready(overwrite(x))
    assert run_state.latest(tmp_path).path is None  # it has not waited
    begin.set()
    saver.wait()
    back, _ = run_state.restore(tmp_path / "step_000001", {"a": jnp.zeros(1024)})
    assert np.array_equal(back["a"], np.arange(1024.0))


def test_what_kept_a_checkpoint_from_being_written_is_raised_at_the_next_call(tmp_path):
    saver = run_state.Saver(tmp_path / "gone" / "file", keep_last=2)
    (tmp_path / "gone").write_text("no folder")
    saver.save(1, {"a": jnp.ones(2)}, {})
    with pytest.raises(OSError, match="gone"):
        saver.wait()
    saver.wait()  # once


def test_a_mismatch_is_one_error_that_lists_every_path(tmp_path):
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones(4), "gone": jnp.ones(1), "same": jnp.ones(1)}
    path = run_state.save(tmp_path, 1, tree, {}, keep_last=1)
    wanted = {
        "a": jax.ShapeDtypeStruct((2, 4), jnp.float32),
        "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16),
        "new": jax.ShapeDtypeStruct((1,), jnp.float32),
        "same": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    with pytest.raises(ValueError, match="does not fit") as error:
        run_state.restore(path, wanted)
    for line in (
        "['a']: stored float32[2, 3], wanted float32[2, 4]",
        "['b']: stored float32[4], wanted bfloat16[4]",
        "['gone']: stored float32[1], wanted absent",
        "['new']: stored absent, wanted float32[1]",
    ):
        assert line in str(error.value)
    assert "same" not in str(error.value)


def test_a_long_mismatch_is_cut(tmp_path):
    tree = {f"w{i:02d}": jnp.ones(1) for i in range(30)}
    path = run_state.save(tmp_path, 1, tree, {}, keep_last=1)
    with pytest.raises(ValueError, match="and 10 more"):
        run_state.restore(path, jax.tree.map(lambda x: jax.ShapeDtypeStruct((2,), x.dtype), tree))


def test_ignored_checkpoints_are_ignored_and_named(tmp_path):
    whole = run_state.save(tmp_path, 4, {"a": jnp.ones(2)}, {}, keep_last=3)
    (tmp_path / "step_000008.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "step_000009").mkdir()
    found = run_state.latest(tmp_path)
    assert found.path == whole
    assert found.ignored == ["step_000008.orbax-checkpoint-tmp", "step_000009"]
    with pytest.raises(ValueError, match="step_000009 is not a whole checkpoint"):
        run_state.restore(tmp_path / "step_000009", {"a": jnp.ones(2)})


KILLED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import jax.numpy as jnp
    from orbit_jax.checkpoint import run_state

    folder = Path(sys.argv[1])
    run_state.save(folder, 1, {"a": jnp.ones(8)}, {}, keep_last=3)

    def kill_in_mid_write():
        while not any("tmp" in path.name for path in folder.iterdir()):
            time.sleep(1e-4)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_in_mid_write, daemon=True).start()
    run_state.save(folder, 2, {"a": jnp.arange(2.0**23)}, {}, keep_last=3)
"""


def test_a_run_killed_in_mid_write_goes_on_from_the_whole_checkpoint(tmp_path):
    script = textwrap.dedent(KILLED)
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
    found = run_state.latest(tmp_path)
    assert found.path == tmp_path / "step_000001"
    assert [name.split(".")[0] for name in found.ignored] == ["step_000002"]
    back, facts = run_state.restore(found.path, {"a": jax.ShapeDtypeStruct((8,), jnp.float32)})
    assert (facts["step"], float(back["a"].sum())) == (1, 8.0)
    again = run_state.save(tmp_path, 2, {"a": jnp.zeros(8)}, {}, keep_last=3)
    assert run_state.latest(tmp_path) == (again, [])


EIGHT_DEVICES = """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from orbit_jax.checkpoint import run_state

    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    value = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
    saved = jax.device_put(value, NamedSharding(mesh, P(("data", "tensor"))))
    path = run_state.save(Path(sys.argv[1]), 1, {"w": saved}, {}, keep_last=1)
    for sharding in (saved.sharding, NamedSharding(mesh, P("tensor", "data")), None):
        wanted = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)}
        back = run_state.restore(path, wanted)[0]["w"]
        assert len(back.sharding.device_set) == (8 if sharding else 1)
        assert sharding is None or back.sharding == sharding
        assert np.array_equal(back, value)
"""


def test_a_state_saved_on_eight_devices_comes_back_on_any_layout(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(EIGHT_DEVICES), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, timeout=60, check=True, env=os.environ | CPU_ONLY)
