"""A run's sampler and step, compiled from shapes alone: no weight is loaded, nothing is run."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from orbit_jax import mesh, parity, startup
from orbit_jax.checkpoint.base import find_base, load_base, read_config
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.placing import OfShapes
from orbit_jax.checkpoint.rehearsal import abstract_base
from orbit_jax.config import Config
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.model.stream import Stream
from orbit_jax.plan import compiler
from orbit_jax.rl import advantages, losses, sampler, train_state
from orbit_jax.rl.admission import admit_prompts
from orbit_jax.rl.batch import Batch, token_buckets
from orbit_jax.rl.sampler import Incoming, SamplerState
from orbit_jax.rl.train_state import TrainState


@dataclass(frozen=True)
class Arguments:
    """What the two programs take, as `jax.ShapeDtypeStruct` with shardings."""

    model: ModelConfig
    base: dict
    state: TrainState
    slots: SamplerState
    incoming: Incoming
    batch: Batch


@dataclass(frozen=True)
class Compiled:
    """One program, and what compiling it took."""

    executable: jax.stages.Compiled
    seconds: float


def arguments(config: Config, devices: Sequence[jax.Device]) -> Arguments:
    """The shapes of a run on these devices: all slots admitted at once, the largest batch.

    Raises:
      ValueError: for what `startup` refuses, or a mesh that does not divide the model.
    """
    devices = tuple(devices[: config.mesh.size])
    model, base = _base(config, devices)
    state = jax.eval_shape(functools.partial(startup.initial_state, config, model, base))
    slots = jax.eval_shape(
        lambda: sampler.empty_state(model, config.decoded_rows, config.num_slots, num_stops=1)
    )
    incoming = _incoming(config, model, slots)
    place = functools.partial(_placed, model, devices)
    batch = _batch(config)
    return Arguments(
        model=model,
        base=base,
        state=place(state, train_state.state_specs(model, state)),
        slots=place(slots, sampler.state_specs(model, slots)),
        incoming=place(incoming, mesh.row_specs(incoming)),
        batch=place(batch, mesh.micro_batch_specs(batch)),
    )


def compile_programs(
    config: Config, given: Arguments, platform: str, recipe: str = "fast"
) -> dict[str, Compiled]:
    """`sample` and `ppo_step` of a run, compiled for the platform that the arguments lie on."""
    programs = parity.build(recipe, given.model, config, platform)
    functions = losses.named(config.ppo.loss), advantages.named(config.ppo.advantage)
    steps = _like(given.state.step, jnp.int32)
    lowerings = {
        "sample": lambda: programs.sample.lower(
            programs.model,
            given.base,
            given.state.policy,
            given.slots,
            given.incoming,
            steps,
            filters=False,
        ),
        "ppo_step": lambda: programs.ppo_step.lower(
            programs.step, given.base, given.state, given.batch, *functions
        ),
    }
    return {name: _timed(lower) for name, lower in lowerings.items()}


def _base(config: Config, devices: tuple[jax.Device, ...]) -> tuple[ModelConfig, dict]:
    """The model with the run's mesh, and its weights; layers are made again unless never to be."""
    path = find_base(config.base.path)
    model = read_config(path) if is_gguf(path) else abstract_base(path)[0]
    shape = MeshShape(config.mesh.data, config.mesh.tensor)
    model = dataclasses.replace(model, mesh=shape, remat=config.ppo.remat != "never")
    startup.require_fit(config, model)
    sharding = functools.partial(mesh.weight_sharding, model, devices=devices)
    if is_gguf(path):
        return model, load_base(path, OfShapes(sharding))[1]
    return model, abstract_base(path, sharding)[1]


def _timed(lower: Callable[[], jax.stages.Lowered]) -> Compiled:
    start = time.monotonic()
    return Compiled(lower().compile(compiler.options()), time.monotonic() - start)


def _placed(model: ModelConfig, devices: tuple[jax.Device, ...], tree, specs):
    if model.mesh.size == 1:
        one = SingleDeviceSharding(devices[0])
        shardings = jax.tree.map(lambda _: one, tree)
    else:
        built = mesh.build(model.mesh, devices)
        shardings = jax.tree.map(lambda _, spec: mesh.named(built, spec), tree, specs)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _like(leaf: jax.ShapeDtypeStruct, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=leaf.sharding)


def _incoming(config: Config, model: ModelConfig, slots: SamplerState) -> Incoming:
    """The longest prompts for all slots, equal within a group."""
    rows, group = config.decoded_rows, config.sampler.group_size
    return admit_prompts(
        model,
        slots,
        prompts=[[0] * config.sampler.max_prompt_tokens] * rows,
        noise_ids=[(0, 0, 0, 0)] * rows,
        groups=[row // group for row in range(rows)],
        max_completion_tokens=config.sampler.max_completion_tokens,
        stop_ids=[0],
        temperature=config.sampler.temperature,
    )


def _batch(config: Config) -> Batch:
    """The largest batch of a run."""
    micro, bucket = config.ppo.micro_batches, token_buckets(config)[-1]
    rows = config.rows // micro
    shape = jax.ShapeDtypeStruct
    tokens, per_row = (micro, bucket.tokens), (micro, rows)
    return Batch(
        stream=Stream(
            *(shape(tokens, jnp.int32) for _ in range(3)),
            num_rows=rows,
            num_slots=config.num_slots,
            prefix=shape(per_row, jnp.int32),
            max_sharers=config.sampler.group_size - 1,
        ),
        sampled=shape(tokens, jnp.bool),
        scored=shape((micro, bucket.scored), jnp.int32),
        logprobs=shape(tokens, jnp.float32),
        rewards=shape(per_row, jnp.float32),
        groups=shape(per_row, jnp.int32),
        truncated=shape(per_row, jnp.bool),
        temperature=shape((), jnp.float32),
        fingerprint=shape((), jnp.uint32),
        num_groups=config.rows,
    )
