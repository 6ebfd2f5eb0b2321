"""Several processes as one run: each runs the same program, and JAX joins their devices.

Every process holds the same host values. What it reads of an array that spans processes is
gathered, of what it places it takes its own part, and what may differ between processes and steers
the run is settled here. With one process, nothing here costs anything.
"""

import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from orbit_jax.config import Config, MeshConfig
from orbit_jax.last_words import LastWords

_MEETING_SECONDS = 300  # that a process waits for the others to start
_THREADS_PER_DEVICE = 8
_SHUTDOWN_SECONDS = 60  # that a process which ends by itself waits for the others


def start(config: Config) -> None:
    """Gives this process its devices and its peers; to be called before any other use of JAX.

    What the config leaves open of number and coordinator, JAX takes from Slurm or Open MPI.

    Raises:
      ValueError: if something is missing there too, if the others cannot be reached or were started
        with another config, or if JAX has been used already.
    """
    if config.mesh.processes > 1 and not jax.distributed.is_initialized():
        _join(config.mesh)
    if config.mesh.simulate:
        try:
            simulate_devices(config.mesh.size // config.mesh.processes)
        except RuntimeError as error:
            raise ValueError(
                "config.mesh.simulate: this process already uses its devices and cannot have "
                f"{config.mesh.size} of them: start a new one (in a notebook, restart the kernel)"
            ) from error
    if config.mesh.processes > 1:
        if jax.default_backend() == "cpu":
            # Processes were seen to wait for each other for ever in the collectives of a program
            # that was read back (jaxlib 0.10.2); in one that is compiled they never did.
            jax.config.update("jax_enable_compilation_cache", False)
        nameless = dataclasses.replace(config.mesh, process=-1)
        require_same("the config", dataclasses.replace(config, mesh=nameless))


def simulate_devices(count: int) -> None:
    """Gives this process so many devices on the CPU.

    Raises:
      RuntimeError: if JAX has been used already, with other devices.
    """
    # XLA's number of threads. A device waits in a thread for others at each collective, also in
    # several at once, and with a thread for each device alone all were seen to wait for ever.
    os.environ["NPROC"] = str(_THREADS_PER_DEVICE * count)
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != count:
        jax.config.update("jax_num_cpu_devices", count)


def require_same(name: str, value: Any) -> None:
    """Refuses, in all processes, a value whose `repr` differs between them."""
    if jax.process_count() > 1:
        marks = from_all(zlib.crc32(repr(value).encode()))
        if (marks != marks[0]).any():
            differ = np.flatnonzero(marks != marks[0]).tolist()
            raise ValueError(
                f"{name} of processes {differ} differs from that of process 0: start all with the "
                "same command, but for mesh.process, on the same files"
            )


def is_first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def first_only(method: Callable) -> Callable:
    """A method that is left out, and returns None, in all processes but the first."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if is_first() else None

    return run


def by_first(fn: Callable, *args: Any) -> Any:
    """`fn(*args)` by the first process; all have its result, in JSON's types, or its error."""
    if jax.process_count() == 1:
        return fn(*args)
    told, failure = {}, None
    if is_first():
        try:
            told = {"result": fn(*args)}
        except Exception as error:
            told, failure = {"error": str(error)}, error
    message = np.frombuffer(json.dumps(told).encode(), np.uint8)
    size = int(from_first(np.array(message.size)))
    told = json.loads(from_first(np.resize(message, size)).tobytes())
    if failure is not None:
        raise failure
    if "error" in told:
        raise RuntimeError(f"process 0: {told['error']}")
    return told["result"]


def from_first(x: np.ndarray) -> np.ndarray:
    """The first process's host array, bit for bit; all give one of the same shape and type."""
    if jax.process_count() == 1:
        return x
    # As bytes: JAX would narrow 64 bits, and sums 0 to what it sends, which loses a minus.
    data = multihost_utils.broadcast_one_to_all(np.ravel(x).view(np.uint8))
    return np.asarray(data).view(x.dtype).reshape(x.shape)


def from_all(x: Any) -> np.ndarray:
    """[processes, ...] what each has: a number, or an array of the same shape and type in all."""
    x = np.asarray(x)
    if jax.process_count() == 1:
        return x[None]
    data = multihost_utils.process_allgather(np.ravel(x).view(np.uint8))
    return np.asarray(data).view(x.dtype).reshape(-1, *x.shape)


def read(tree: Any) -> Any:
    """`jax.device_get` in all processes, which must all call it; one array after another."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return jax.device_get(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """`jax.device_put`; of a host array each process takes its devices' part."""
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)  # device_put would compare it between processes first
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _join(mesh: MeshConfig) -> None:
    # Its handler would keep SIGTERM from a process that loads; later `StopFlag` has it.
    jax.config.update("jax_enable_preemption_service", False)
    words = LastWords()
    words.prepare(
        f"error: the {mesh.processes} processes of this run did not all meet within "
        f"{_MEETING_SECONDS} s: start each, and give all the host:port of process 0 in "
        f"mesh.coordinator (here: {mesh.coordinator or 'as the cluster says'}), a port that is free"
    )
    try:
        jax.distributed.initialize(
            mesh.coordinator or None,
            mesh.processes,
            mesh.process if mesh.process >= 0 else None,
            initialization_timeout=_MEETING_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"config.mesh.processes={mesh.processes}: JAX cannot join them ({error}); outside of "
            "Slurm and Open MPI give mesh.coordinator, host:port of process 0, to all and to each "
            "its mesh.process"
        ) from error
    finally:
        words.take_back()
