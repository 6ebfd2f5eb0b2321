"""What a run needs before its first step: devices, the frozen base, tokenizer, adapters, slots.

Everything that can be refused is refused here, before any long work.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from orbit_jax import compile as compiler
from orbit_jax import mesh, processes
from orbit_jax.adapters.adapter import Adapter, attach, fingerprint, is_named
from orbit_jax.adapters.lora import LoRA
from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.source import Source, source_of
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.config import Config
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.model.init import init_weights
from orbit_jax.plan.estimate import Estimate, estimate
from orbit_jax.quant.qtensor import QTensor, working_copy
from orbit_jax.rl import sampler
from orbit_jax.rl.sampler import SamplerState
from orbit_jax.rl.train_state import (
    Critic,
    TrainState,
    init_state,
    state_specs,
    trained_parameters,
)

_ROOMY = 0.5  # of the free memory: an estimate below it needs no closer look


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The base and what belongs to it.

    Attributes:
      base: the weights that the programs read: packed, or the working copy.
      packed_bytes: of the packed base; working_copy_bytes: of the copy, 0 without one.
      hash: ties adapters and checkpoints to the base.
    """

    model: ModelConfig
    base: dict
    tokenizer: Tokenizer
    packed_bytes: int
    working_copy_bytes: int
    hash: str


def set_up_jax(config: Config) -> None:
    """Where compiled programs are kept, devices and processes; to be called before any other."""
    if config.run.compilation_cache and not jax.config.jax_compilation_cache_dir:
        folder = Path(config.run.root).absolute() / "compilation_cache"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    processes.start(config)


@functools.cache
def _compiled(fn: Callable) -> compiler.Program:
    """`fn` as one program for each shape, made once a process: op by op, start-up takes longer."""
    return compiler.jit(fn, compiler.options("fast"))


def load(config: Config, progress: Callable[[int, int], None] | None = None) -> Frozen:
    """Loads the base onto the mesh and checks that the run's slots fit the memory.

    Random weights (`base.weights`) are drawn there instead. `progress` is told the bytes of weights
    that are done and those in total.

    Raises:
      ValueError: for a checkpoint that cannot be read, a tokenizer of another model, a mesh that
        does not divide the model, prompts and completions longer than the model's positions, or
        more rows than memory would hold.
    """
    shape = MeshShape(config.mesh.data, config.mesh.tensor)
    mesh.build(shape)
    source = _source(config)
    tokenizer = source.tokenizer()
    model = dataclasses.replace(source.config(), mesh=shape)
    require_fit(config, model)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"config.base.path={config.base.path!r}: its tokenizer has {tokenizer.vocab_size} ids, "
            f"its model {model.vocab_size}: the files belong to different models"
        )
    model = _with_remat(config, model)
    where = functools.partial(mesh.weight_sharding, model)
    base = source.load(Placement(sharding=where, progress=progress))
    packed = base_bytes(base)
    copy = _wants_copy(config, base)
    if copy:
        widened = _compiled(working_copy)
        base = jax.tree.map(
            lambda q: widened(q) if isinstance(q, QTensor) else q,
            base,
            is_leaf=lambda q: isinstance(q, QTensor),
        )
    found = source.hash()
    processes.require_same("the base at base.path", found)
    return Frozen(
        model=model,
        base=base,
        tokenizer=tokenizer,
        packed_bytes=packed,
        working_copy_bytes=base_bytes(base) if copy else 0,
        hash=found,
    )


def require_fit(config: Config, model: ModelConfig) -> None:
    """Refuses a mesh that does not divide the model, ranks above its width and rows above its
    positions.
    """
    mesh.validate(model)
    adapter = config.adapter
    methods = [adapter.common, *(method for _, method in adapter.overriding)]
    ranks = [method.rank for method in methods if isinstance(method, LoRA)]
    if max(ranks, default=0) > model.hidden_size:
        raise ValueError(
            f"config.adapter.rank={adapter.rank}, overrides={adapter.overrides}: ranks must be at "
            f"most the model's width, {model.hidden_size}"
        )
    if config.num_slots > model.max_positions:
        raise ValueError(
            f"config.sampler: max_prompt_tokens + max_completion_tokens need {config.num_slots} "
            f"positions, the model has {model.max_positions}: lower one of them"
        )


def check_prompts(config: Config, prompts: Mapping[str, Sequence[int]]) -> None:
    """Refuses prompts [token ids] by name that sampling has no room for, before it begins.

    Raises:
      ValueError: for a prompt that is empty or longer than `sampler.max_prompt_tokens`, or prompts
        that another process has otherwise.
    """
    longest = max(prompts, key=lambda name: len(prompts[name]))
    limit = config.sampler.max_prompt_tokens
    if len(prompts[longest]) > limit:
        count = sum(len(prompt) > limit for prompt in prompts.values())
        raise ValueError(
            f"config.sampler.max_prompt_tokens={limit}: {count} of {len(prompts)} prompts are "
            f"longer; the longest, of problem {longest!r}, has {len(prompts[longest])} tokens: "
            "raise the limit or leave these problems out"
        )
    empty = next((name for name, prompt in prompts.items() if not prompt), None)
    if empty is not None:
        raise ValueError(f"the prompt of problem {empty!r} has no tokens: mend the chat template")
    processes.require_same("the problems", prompts)


def train_state(config: Config, frozen: Frozen) -> TrainState:
    """The policy as training begins, and a critic where the advantage needs one; on the mesh.

    The reference of a KL is the base, or the policy as it begins where that is an adapter already.

    Raises:
      ValueError: if the adapter that training is to begin from cannot be read or belongs to another
        base, or if the targets of a fresh one do not fit the base.
    """
    policy = None
    if config.adapter.initial:
        policy = load_adapter(config.adapter.initial, frozen.model, frozen.hash)
    state = initial_state(config, frozen.model, frozen.base, policy)
    return mesh.place(frozen.model, state, state_specs(frozen.model, state))


def initial_state(
    config: Config, model: ModelConfig, base: dict, policy: Adapter | None = None
) -> TrainState:
    """`train_state` before it is placed; of the base only shapes matter."""
    adapter, reference = config.adapter, None
    keys = jax.random.split(jax.random.key(config.seed))
    if policy is None:
        policy = attach(adapter.common, keys[0], base, adapter.targets, adapter.overriding)
    elif config.ppo.kl != "off":
        reference = policy
    critic = None
    if config.ppo.critic:
        head = jnp.zeros(model.hidden_size)
        critic = Critic(_critic_adapter(config, keys[1], base), head)
    adapted = config.ppo.kl_coefficient if config.ppo.kl_target else None
    return init_state(config.optimizer, policy, critic, reference, adapted)


def slots(config: Config, frozen: Frozen) -> SamplerState:
    """The sampler's empty slots, `sampler.slots` of them; on the mesh."""
    stops = len(frozen.tokenizer.eos_ids)
    state = sampler.empty_state(frozen.model, config.decoded_rows, config.num_slots, stops)
    return mesh.place(frozen.model, state, sampler.state_specs(frozen.model, state))


def facts(frozen: Frozen, state: TrainState) -> dict[str, str | int]:
    """What the run folder records about the base and the adapter."""
    params = jax.tree.leaves(state.policy.params)
    return {
        "base_hash": frozen.hash,
        "base_bytes": frozen.packed_bytes,
        "working_copy_bytes": frozen.working_copy_bytes,
        "adapter_bytes": sum(p.nbytes for p in params),
        "adapter_parameters": sum(p.size for p in params),
        "adapter_fingerprint": int(_compiled(fingerprint)(state.policy.params)),
        "adapter_method": state.policy.methods,
        "mesh": f"{frozen.model.mesh.data}x{frozen.model.mesh.tensor}",
    }


def memory_sentence(config: Config, frozen: Frozen) -> str:
    """For the log: what a run needs by estimate, and whether layers are made again."""
    memory, model = _estimate(config, frozen.model), frozen.model
    how = "made again layer by layer" if model.remat else "kept"
    copy = frozen.working_copy_bytes
    base = _megabytes(frozen.packed_bytes) + (f" (working copy {_megabytes(copy)})" if copy else "")
    return (
        f"memory, by estimate: base {base}; of each device adapters and moments "
        f"{_megabytes(memory.adapters)}, cache {_megabytes(memory.cache)}, activations "
        f"{_megabytes(memory.ppo_step)} for the backward pass, {how} (ppo.remat={config.ppo.remat})"
    )


def _critic_adapter(config: Config, key: jax.Array, base: dict) -> Adapter:
    """Of the overrides it has those that name a weight of its own targets."""
    adapter = config.adapter
    targets = adapter.critic_targets or adapter.targets
    overrides = tuple(
        (name, method)
        for name, method in adapter.overriding
        if any(is_named(name, t.split(".")) or is_named(t, name.split(".")) for t in targets)
    )
    try:
        return attach(adapter.common, key, base, targets, overrides)
    except ValueError as error:
        raise ValueError(f"config.adapter.critic_targets={targets}: {error}") from None


def _source(config: Config) -> Source:
    return source_of(config.base.path, config.base.weights, config.seed)


def _wants_copy(config: Config, base: dict) -> bool:
    if config.base.working_copy != "auto":
        return config.base.working_copy == "always"
    weights = jax.tree.leaves(base, is_leaf=lambda q: isinstance(q, QTensor))
    widened = sum(2 * int(np.prod(w.shape)) for w in weights)
    return widened <= config.base.working_copy_share * _free_bytes()


def _estimate(config: Config, model: ModelConfig) -> Estimate:
    shapes = jax.eval_shape(functools.partial(init_weights, model), jax.random.key(0))
    state = jax.eval_shape(functools.partial(initial_state, config, model, shapes))
    base = -(-_source(config).nbytes() // model.mesh.size)
    return estimate(config, model, base, trained_parameters(state))


def _with_remat(config: Config, model: ModelConfig) -> ModelConfig:
    """Decides on `ppo.remat`, and refuses what, with it, exceeds the free memory."""
    # Simulated devices share the host's memory.
    free = _free_bytes() // (model.mesh.size if config.mesh.simulate else 1)
    kept, again = (dataclasses.replace(model, remat=remat) for remat in (False, True))
    tight = _estimate(config, kept).total > _ROOMY * free
    model = {"always": again, "never": kept, "auto": again if tight else kept}[config.ppo.remat]
    memory = _estimate(config, model)
    if memory.total > free:
        raise ValueError(
            f"config.sampler: {config.decoded_rows} rows of {config.num_slots} positions and "
            f"micro-batches of {config.rows // config.ppo.micro_batches} rollouts need about "
            f"{memory.total / 1e9:.1f} GB of each device (base {memory.base / 1e9:.1f}, adapters "
            f"{memory.adapters / 1e9:.1f}, cache {memory.cache / 1e9:.1f}, temporaries "
            f"{memory.temporaries / 1e9:.1f}), {free / 1e9:.1f} GB are free: raise "
            "ppo.micro_batches, lower sampler.slots, prompts_per_step, group_size or the token "
            "limits, or leave ppo.remat to 'auto'; experiments/plan.py says how far each may go"
        )
    return model


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _free_bytes() -> int:
    """Free memory of the first device, or of the host where the device is the host.

    Of several processes the least, so that all decide alike.
    """
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    free = psutil.virtual_memory().available
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    return int(processes.from_all(free).min())
