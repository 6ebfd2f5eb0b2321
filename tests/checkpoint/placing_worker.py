"""Loads folders on eight simulated devices; run by test_placing in a process of its own.

    python placing_worker.py memory FOLDER host|device
    python placing_worker.py values FOLDER...

A folder with no more than a `config.json` is given random weights. The first prints JSON:
`base_bytes`, and `over_bytes`, what the process held at most beyond the arrays of the base. The
second prints the weights that are not the same bits on the mesh, each
device widening its own part, as on one device.
"""

import dataclasses
import functools
import json
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.tree_util import DictKey, tree_leaves_with_path

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from orbit_jax import mesh  # noqa: E402
from orbit_jax.checkpoint import placing, rehearsal  # noqa: E402
from orbit_jax.checkpoint.base import base_bytes  # noqa: E402
from orbit_jax.checkpoint.source import Rehearsal, Source, source_of  # noqa: E402
from orbit_jax.model.config import MeshShape, ModelConfig  # noqa: E402
from orbit_jax.quant.qtensor import QTensor, dequantize  # noqa: E402


def source(folder: str) -> Source:
    return (
        source_of(folder)
        if list(Path(folder).glob("*.safetensors"))
        else Rehearsal(Path(folder), 5)
    )


def on_mesh(folder: str, on_device: bool) -> tuple[ModelConfig, dict]:
    config = dataclasses.replace(source(folder).config(), mesh=MeshShape(2, 4))
    sharding = functools.partial(mesh.weight_sharding, config)
    base = source(folder).load(placing.Placement(sharding, on_device=on_device))
    if isinstance(source(folder), Rehearsal):
        facts = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
        expected = rehearsal.abstract_base(folder, sharding)[1]
        assert jax.tree.map(facts, base) == jax.tree.map(facts, expected)
    return config, base


def memory(folder: str, where: str) -> dict:
    process = psutil.Process()
    jax.block_until_ready(jnp.zeros(1))
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, base = on_mesh(folder, on_device=where == "device")
    done.set()
    watcher.join()
    held = base_bytes(base)  # on the host, replicas are one array
    if where == "device":
        held = sum(s.data.nbytes for leaf in jax.tree.leaves(base) for s in leaf.addressable_shards)
    return {"base_bytes": base_bytes(base), "over_bytes": peak - before - held}


def values(*folders: str) -> list[str]:
    placing._SMALL = 0  # so that small shards take the way of large ones
    different = []
    is_weight = lambda node: isinstance(node, QTensor)  # noqa: E731

    def widen(base: dict) -> dict:
        def one(node: QTensor | jax.Array) -> jax.Array:
            return dequantize(node, jnp.float32) if is_weight(node) else node

        return jax.tree.map(one, base, is_leaf=is_weight)

    def widened_spec(path: tuple, _: QTensor | jax.Array) -> jax.sharding.PartitionSpec:
        return mesh.weight_spec(tuple(k.key for k in path if isinstance(k, DictKey)))

    for i, folder in enumerate(folders):
        whole = jax.jit(widen)(source(folder).load(placing.DEFAULT_PLACEMENT))
        config, base = on_mesh(folder, on_device=i % 2 == 0)
        out = jax.tree_util.tree_map_with_path(widened_spec, base, is_leaf=is_weight)
        parts = jax.jit(mesh.per_device(widen, config, (mesh.base_specs(base),), out))(base)
        for (path, a), b in zip(tree_leaves_with_path(whole), jax.tree.leaves(parts), strict=True):
            if not np.array_equal(a, b):
                different.append(f"{folder} {jax.tree_util.keystr(path)}")
    return different


if __name__ == "__main__":
    print(json.dumps({"memory": memory, "values": values}[sys.argv[1]](*sys.argv[2:])))
