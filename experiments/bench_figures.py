"""This project's own figures for `bench.py`: rates over batch sizes, bytes, shares of a matmul."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax import mesh, parity, startup
from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.config import (
    AdapterConfig,
    BaseConfig,
    Config,
    SamplerConfig,
)
from orbit_jax.model.config import ModelConfig
from orbit_jax.rl import sampler
from orbit_jax.rl.admission import admit_prompts
from orbit_jax.rl.rollouts import Rollouts, clear
from orbit_jax.rl.train_state import TrainState, init_state

BATCHES = (1, 4, 8, 32)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A base with a fresh adapter, and the programs that run it."""

    model: ModelConfig
    base: dict
    state: TrainState
    programs: parity.Programs


def subject(config: Config, model: ModelConfig, base: dict) -> Subject:
    """A subject with LoRA on all linear layers."""
    method = LoRA(config.adapter.rank, config.adapter.alpha)
    state = init_state(config.optimizer, attach(method, jax.random.key(0), base), None)
    programs = parity.build("fast", model, config)
    return Subject(programs.model, base, state, programs)


def timed(run: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds, after one run that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compiled(program: Any, *arguments: Any) -> tuple[Any, dict[str, float]]:
    """An executable, its seconds of compilation and the bytes that the compiler sets aside."""
    began = time.perf_counter()
    executable = program.lower(*arguments).compile()
    memory = executable.memory_analysis()
    return executable, {
        "compile_seconds": time.perf_counter() - began,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


class Sampling:
    """The sampler for B prompts of equal length with `new_tokens` each."""

    def __init__(self, subject: Subject, rows: int, prompt_tokens: int, new_tokens: int):
        self.subject, self.prompt_tokens, self.new_tokens = subject, prompt_tokens, new_tokens
        model = subject.model
        slots = -(-(prompt_tokens + new_tokens) // 64) * 64
        state = sampler.empty_state(model, rows, slots, 1)
        self.slots = mesh.place(model, state, sampler.state_specs(model, state))
        rng = np.random.default_rng(0)
        prompts = rng.integers(1, model.vocab_size, (rows, prompt_tokens)).tolist()
        noise = [(0, 0, row, 0) for row in range(rows)]
        self.incoming = admit_prompts(
            model, self.slots, prompts, noise, range(rows), new_tokens, (), 1.0
        )
        self.program, self.facts = compiled(
            subject.programs.sample, model, *self.arguments(new_tokens)
        )

    def arguments(self, steps: int) -> tuple:
        """What the executable takes."""
        policy = self.subject.state.policy
        return self.subject.base, policy, self.slots, self.incoming, np.int32(steps)

    def run(self, steps: int) -> jax.Array:
        """Processes the prompts and draws at most `steps` tokens of each row."""
        self.slots = clear(self.subject.model, self.slots)
        self.slots = self.program(*self.arguments(steps))
        return self.slots.status

    def rates(self) -> dict[str, float]:
        """Tokens per second of both halves."""
        rows = len(self.slots.status)
        prefill, whole = timed(lambda: self.run(1)), timed(lambda: self.run(self.new_tokens))
        decoded = rows * (self.new_tokens - 1)
        return {
            "rows": rows,
            "prefill_tokens_per_second": rows * self.prompt_tokens / prefill,
            "decode_tokens_per_second": decoded / max(whole - prefill, 1e-9),
            "seconds": whole,
            **self.facts,
        }

    def rollouts(self) -> Rollouts:
        """What was drawn last, two rows a group."""
        state = jax.device_get(self.slots)
        rows = len(state.lengths)
        return Rollouts(
            tokens=state.tokens,
            lengths=state.lengths,
            prompt_lengths=np.full(rows, self.prompt_tokens),
            sampled=state.sampled,
            logprobs=state.logprobs,
            status=state.status,
            groups=np.arange(rows) // 2,
            temperature=1.0,
            filtered=False,
            fingerprint=int(state.fingerprint),
            calls=1,
            decode_steps=int(state.decode_steps),
        )


def own_figures(settings: Mapping, own: Mapping, cases: Mapping, quick: bool) -> dict:
    """Rates of a base over batch sizes, bytes, and shares of the machine's matmul rate.

    Args:
      settings, own: what `ours_worker.py` was told.
      cases: what it took, for the share that a PPO step reaches.
    """
    prompt_tokens, new_tokens = len(settings["prompt_ids"][0]), settings["new_tokens"]
    batches = BATCHES[1:2] if quick else BATCHES
    config = Config(
        base=BaseConfig(path=settings["base"], working_copy=own.get("working_copy", "never")),
        adapter=AdapterConfig(rank=settings["rank"], alpha=float(settings["alpha"])),
        sampler=SamplerConfig(1, max(batches), 1.0, prompt_tokens, new_tokens),
    )
    frozen = startup.load(config)
    it = subject(config, frozen.model, frozen.base)
    layers, head = linear_parameters(frozen.model)
    peak = matmul_flops_per_second()
    rates = []
    for rows in batches:
        found = Sampling(it, rows, prompt_tokens, new_tokens).rates()
        found["prefill_matmul_share"] = 2 * layers * found["prefill_tokens_per_second"] / peak
        found["decode_matmul_share"] = (
            2 * (layers + head) * found["decode_tokens_per_second"] / peak
        )
        rates.append(found)
    figures = {
        "matmul_flops_per_second": peak,
        "rates": rates,
        "base_bytes": frozen.packed_bytes,
        "working_copy_bytes": frozen.working_copy_bytes,
        "adapter_bytes": sum(x.nbytes for x in jax.tree.leaves(it.state.policy.params)),
        "train_state_bytes": sum(x.nbytes for x in jax.tree.leaves(it.state)),
    }
    if {"sample", "step"} <= set(cases):
        # Forward, and backward to activations: weights are frozen. A group shares its prompt.
        seconds = cases["step"]["ours"]["seconds"] - cases["sample"]["ours"]["seconds"]
        drawn = cases["sample"]["ours"]["tokens"]
        tokens = drawn + prompt_tokens * len(settings["prompts"])
        flops = 4 * (layers * tokens + head * drawn)
        figures["train_matmul_share"] = flops / max(seconds, 1e-9) / peak
    return figures


def matmul_flops_per_second(size: int = 2048) -> float:
    """What the machine reaches on one large bf16 matmul with f32 results."""
    x = jnp.ones((size, size), jnp.bfloat16)
    dot = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * size**3 / min(timed(lambda: dot(x, x)) for _ in range(3))


def linear_parameters(model: ModelConfig) -> tuple[int, int]:
    """Weights that a token is multiplied by: of all layers, and of the head."""
    d, heads = model.hidden_size, model.num_heads + model.num_kv_heads
    attention = 2 * d * heads * model.head_dim
    dense, sparse = 3 * d * model.intermediate_size, 3 * d * model.top_k * model.expert_size
    layers = sum(
        attention + (sparse + d * model.num_experts if is_sparse else dense)
        for is_sparse in model.sparse
    )
    return layers, d * model.vocab_size


def rates_table(figures: Mapping) -> str:
    """As Markdown."""
    share = figures.get("train_matmul_share")
    lines = [
        f"One large bf16 matmul reaches {figures['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s here"
        + (f"; a PPO step's training reaches {share:.0%} of that." if share else "."),
        f"Bytes: base {figures['base_bytes']:,}, working copy {figures['working_copy_bytes']:,}, "
        f"adapter {figures['adapter_bytes']:,}, training state {figures['train_state_bytes']:,}.",
        "",
        "| rows | prefill, tokens/s | share of matmul rate | decode, tokens/s | share | "
        "compilation, s | temporaries, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in figures["rates"]:
        lines.append(
            f"| {r['rows']} | {r['prefill_tokens_per_second']:.0f} | "
            f"{r['prefill_matmul_share']:.0%} | {r['decode_tokens_per_second']:.0f} | "
            f"{r['decode_matmul_share']:.0%} | {r['compile_seconds']:.1f} | "
            f"{r['temp_bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines)
