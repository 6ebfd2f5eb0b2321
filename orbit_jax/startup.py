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
from orbit_jax import mesh
from orbit_jax.adapters.adapter import Adapter, attach, fingerprint, is_named
from orbit_jax.checkpoint.base import base_bytes
from orbit_jax.checkpoint.peft import load_adapter
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.source import Source, source_of
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.config import Config
from orbit_jax.model.config import MeshShape, ModelConfig
from orbit_jax.quant.qtensor import QTensor, working_copy
from orbit_jax.rl import sampler
from orbit_jax.rl.batch import token_buckets
from orbit_jax.rl.sampler import SamplerState
from orbit_jax.rl.train_state import Critic, TrainState, init_state, state_specs

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
    """Where compiled programs are kept, and simulated devices; to be called before any other."""
    if config.run.compilation_cache and not jax.config.jax_compilation_cache_dir:
        folder = Path(config.run.root).absolute() / "compilation_cache"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if not config.mesh.simulate:
        return
    count = config.mesh.data * config.mesh.tensor
    try:
        jax.config.update("jax_platforms", "cpu")
        if jax.config.jax_num_cpu_devices != count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            f"config.mesh.simulate: this process already uses its devices and cannot have {count} "
            "of them: start a new one (in a notebook, restart the kernel)"
        ) from error


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
    mesh.validate(model)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"config.base.path={config.base.path!r}: its tokenizer has {tokenizer.vocab_size} ids, "
            f"its model {model.vocab_size}: the files belong to different models"
        )
    adapter = config.adapter
    if max([adapter.rank, *(m.rank for _, m in adapter.overriding)]) > model.hidden_size:
        raise ValueError(
            f"config.adapter.rank={adapter.rank}, overrides={adapter.overrides}: ranks must be at "
            f"most the model's width, {model.hidden_size}"
        )
    if config.num_slots > model.max_positions:
        raise ValueError(
            f"config.sampler: max_prompt_tokens + max_completion_tokens need {config.num_slots} "
            f"positions, the model has {model.max_positions}: lower one of them"
        )
    model = _with_remat(config, model)
    where = functools.partial(mesh.weight_sharding, model)
    base = source.load(Placement(sharding=where, progress=progress))
    packed = base_bytes(base)
    copy = _wants_copy(config, base)
    if copy:
        widen = compiler.jit(working_copy, compiler.options("fast"))
        base = jax.tree.map(
            lambda q: widen(q) if isinstance(q, QTensor) else q,
            base,
            is_leaf=lambda q: isinstance(q, QTensor),
        )
    return Frozen(
        model=model,
        base=base,
        tokenizer=tokenizer,
        packed_bytes=packed,
        working_copy_bytes=base_bytes(base) if copy else 0,
        hash=source.hash(),
    )


def encode_prompts(
    config: Config,
    tokenizer: Tokenizer,
    conversations: Mapping[str, Sequence[Mapping[str, str]]],
) -> dict[str, list[int]]:
    """Token ids of every prompt of the run, by problem id.

    Raises:
      ValueError: for a prompt that is longer than `sampler.max_prompt_tokens`.
    """
    prompts = {name: tokenizer.encode_chat(messages) for name, messages in conversations.items()}
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
    return prompts


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
        policy = attach(adapter.method, keys[0], base, adapter.targets, adapter.overriding)
    elif config.ppo.kl != "off":
        reference = policy
    critic = None
    if config.ppo.critic:
        head = jnp.zeros(model.hidden_size)
        critic = Critic(_critic_adapter(config, keys[1], base), head)
    return init_state(config.optimizer, policy, critic, reference)


def slots(config: Config, frozen: Frozen) -> SamplerState:
    """The sampler's empty slots, `sampler.slots` of them; on the mesh."""
    stops = len(frozen.tokenizer.eos_ids)
    state = sampler.empty_state(frozen.model, config.decoded_rows, config.num_slots, stops)
    return mesh.place(frozen.model, state, sampler.state_specs(frozen.model, state))


def facts(frozen: Frozen, state: TrainState) -> dict[str, str | int]:
    """What the run folder records about the base and the adapter."""
    params = jax.tree.leaves(state.policy.params)
    mark = compiler.jit(fingerprint, compiler.options("fast"))
    return {
        "base_hash": frozen.hash,
        "base_bytes": frozen.packed_bytes,
        "working_copy_bytes": frozen.working_copy_bytes,
        "adapter_bytes": sum(p.nbytes for p in params),
        "adapter_parameters": sum(p.size for p in params),
        "adapter_fingerprint": int(mark(state.policy.params)),
        "adapter_method": state.policy.methods,
        "mesh": f"{frozen.model.mesh.data}x{frozen.model.mesh.tensor}",
    }


def memory_sentence(config: Config, frozen: Frozen) -> str:
    """For the log: what a run needs by estimate, and whether layers are made again."""
    memory, model = _estimate(config, frozen.model), frozen.model
    layers = 1 if model.remat else model.num_layers
    how = "made again layer by layer" if model.remat else "kept"
    copy = frozen.working_copy_bytes
    base = _megabytes(frozen.packed_bytes) + (f" (working copy {_megabytes(copy)})" if copy else "")
    return (
        f"memory, by estimate: base {base}, cache {_megabytes(memory.cache)}, activations "
        f"{_megabytes(memory.total(layers) - memory.total(0))} for the backward pass, {how} "
        f"(ppo.remat={config.ppo.remat})"
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
        return attach(adapter.method, key, base, targets, overrides)
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


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a run needs by a closed form, in bytes over all devices."""

    base: int
    cache: int
    layer: int  # activations that the backward pass of one layer reads, of one micro-batch
    logits: int

    def total(self, layers: int) -> int:
        return self.base + self.cache + layers * self.layer + self.logits


def _estimate(config: Config, model: ModelConfig) -> _Memory:
    item = 2  # bf16
    positions = config.decoded_rows * config.num_slots
    # A latent is key and value at once.
    per_position = (1 if model.latent else 2) * model.num_kv_heads * model.head_dim * item
    # What one layer's backward pass keeps, per token: inputs and outputs of its matmuls.
    width = 6 * model.hidden_size + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    experts = model.top_k * model.expert_size if any(model.sparse) else 0
    width += 4 * max(experts, 0 if all(model.sparse) else model.intermediate_size)
    return _Memory(
        base=_source(config).nbytes(),
        cache=per_position * model.num_layers * positions,
        layer=token_buckets(config)[-1].tokens * width * item,
        logits=4 * 4 * model.head_chunk * model.vocab_size,  # f32, with what its gradient needs
    )


def _with_remat(config: Config, model: ModelConfig) -> ModelConfig:
    """Decides on `ppo.remat`, and refuses what, with it, exceeds the free memory."""
    memory, free = _estimate(config, model), _free_bytes() * model.mesh.size
    if config.mesh.simulate:
        free //= model.mesh.size  # simulated devices share the host's memory
    kept = memory.total(model.num_layers)
    remat = {"always": True, "never": False, "auto": kept > _ROOMY * free}[config.ppo.remat]
    needed = memory.total(1) if remat else kept
    if needed > free:
        raise ValueError(
            f"config.sampler: {config.decoded_rows} rows of {config.num_slots} positions and "
            f"micro-batches of {config.rows // config.ppo.micro_batches} rollouts need about "
            f"{needed / 1e9:.1f} GB (base {memory.base / 1e9:.1f}, cache {memory.cache / 1e9:.1f}, "
            f"activations {(needed - memory.total(0)) / 1e9:.1f}), {free / 1e9:.1f} GB are free: "
            "raise ppo.micro_batches, lower sampler.slots, prompts_per_step, group_size or the "
            "token limits, or leave ppo.remat to 'auto'"
        )
    return dataclasses.replace(model, remat=remat)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _free_bytes() -> int:
    """Free memory of the first device, or of the host where the device is the host."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available
