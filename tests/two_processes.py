"""One of two processes that hold different values and must agree (see `test_processes.py`).

    python two_processes.py <its number> <port>

Prints one JSON object.
"""

import dataclasses
import json
import signal
import sys

import jax
import numpy as np
import toy
from jax.sharding import PartitionSpec as P

from orbit_jax import mesh, processes, startup
from orbit_jax.config import Config, MeshConfig
from orbit_jax.model.config import MeshShape
from orbit_jax.rl.batch import Bucket, make_batch
from orbit_jax.rl.rollouts import Rollouts
from orbit_jax.runs.interrupt import StopFlag


def refuse(number: int) -> None:
    raise ValueError(f"refused by {number}")


def refusal(number: int) -> str:
    try:
        processes.by_first(refuse, number)
    except (ValueError, RuntimeError) as error:
        return str(error)


def stopped(number: int) -> list[bool]:
    with StopFlag() as stop:
        before = stop.requested
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
        return [before, stop.requested]


def rewards(model, number: int) -> list:
    rows, width = 4, 16
    rollouts = Rollouts(
        tokens=np.ones((rows, width), np.int32),
        lengths=np.full(rows, 6, np.int32),
        prompt_lengths=np.full(rows, 3, np.int32),
        sampled=np.tile(np.arange(width) >= 3, (rows, 1)),
        logprobs=np.zeros((rows, width), np.float32),
        status=np.ones(rows, np.int32),
        groups=np.arange(rows, dtype=np.int32),
        temperature=1.0,
        filtered=False,
        fingerprint=0,
        calls=1,
        decode_steps=2,
    )
    graded = np.array([1, 0, 1, 1 - number], np.float32)  # the last one's grader was late
    batch = make_batch(model, rollouts, graded, 1, (Bucket(64, 64),))
    return processes.read(batch.rewards)[0].tolist()


def main(number: int, port: str) -> None:
    devices = MeshConfig(4, 1, True, processes=2, process=number, coordinator=f"localhost:{port}")
    processes.start(Config(mesh=devices))
    model = dataclasses.replace(toy.MOE, mesh=MeshShape(4, 1))
    placed = mesh.place(model, np.arange(8) - 0.5, P("data"))
    startup.psutil.virtual_memory = lambda: type("Memory", (), {"available": 10**12 + 1 - number})
    figures = {
        "devices": [jax.device_count(), jax.local_device_count()],
        "bits": processes.from_first(np.array([-0.0, 2.0**-1074 + number])).tobytes().hex(),
        "all": processes.from_all(10**12 + number).tolist(),
        "refusal": refusal(number),
        "read": processes.read({"whole": placed, "host": 3}),
        "free": startup._free_bytes(),
        "rewards": rewards(model, number),
        "stopped": stopped(number),
    }
    print(json.dumps(figures, default=np.ndarray.tolist))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
