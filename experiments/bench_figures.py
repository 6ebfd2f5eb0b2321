"""This project's own figures for `bench.py`: rates, growth, and the share of the matmul rate.

A point is one model with one batch: its two programs are compiled, which tells the bytes that the
compiler sets aside, and run.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from matplotlib.figure import Figure
from rivals.worker import Meter

from orbit_jax import mesh, parity, startup
from orbit_jax.adapters.adapter import attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.config import (
    AdapterConfig,
    BaseConfig,
    Config,
    OptimizerConfig,
    PPOConfig,
    SamplerConfig,
)
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.rl import sampler
from orbit_jax.rl.advantages import group_relative
from orbit_jax.rl.batch import Bucket, make_batch
from orbit_jax.rl.losses import ppo_clip
from orbit_jax.rl.rollouts import Rollouts, admit_prompts, clear
from orbit_jax.rl.train_state import TrainState, init_state
from orbit_jax.runs.plots import COLOURS, FAINT

SMALL = ModelConfig(
    family="qwen3_moe",
    vocab_size=1024,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=4096,
    tie_word_embeddings=True,
    qk_norm=True,
    sparse=(True,) * 4,
    num_experts=8,
    top_k=2,
    expert_size=256,
    norm_topk_prob=True,
)
AXES = {  # what grows, and the values that it takes; everything else stays at the first of these
    "rows": (8, 4, 16, 32),
    "tokens": (128, 64, 256, 512),
    "experts": (8, 4, 16, 64),
    "layers": (4, 2, 8, 16),
}
QUICK_AXES = {"rows": (2,), "tokens": (64,), "experts": (4,), "layers": (1,)}
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


def resident_bytes() -> int:
    """Of this process, once freed memory has gone back to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
    return psutil.Process().memory_info().rss


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


def growth(quick: bool) -> list[dict]:
    """A row for each value of each axis: seconds and bytes of sampling and of a PPO step."""
    axes = QUICK_AXES if quick else AXES
    usual = {axis: values[0] for axis, values in axes.items()}
    points = [(axis, v, usual | {axis: v}) for axis in axes for v in sorted(axes[axis])]
    return [{"axis": axis, "value": v, **grow(**point)} for axis, v, point in points]


@functools.cache
def grow(rows: int, tokens: int, experts: int, layers: int) -> dict:
    """One point of the growth curves, on random weights; half of the tokens are the prompt's.

    `step_measured_bytes` is what running the step adds to the resident memory.
    """
    model = dataclasses.replace(
        SMALL, num_experts=experts, num_layers=layers, sparse=(True,) * layers
    )
    config = dataclasses.replace(
        Config(), ppo=PPOConfig(micro_batches=1), optimizer=OptimizerConfig(learning_rate=1e-5)
    )
    base = jax.jit(lambda key: freeze(init_weights(model, key)))(jax.random.key(0))
    it = subject(config, model, base)
    sampling = Sampling(it, rows, tokens // 2, tokens // 2)
    sample_seconds = timed(lambda: sampling.run(tokens // 2))
    bucket = Bucket(rows * tokens, rows * (tokens // 2))
    batch = make_batch(it.model, sampling.rollouts(), np.arange(rows) % 2, 1, (bucket,))
    step, facts = compiled(
        it.programs.ppo_step, it.programs.step, base, it.state, batch, ppo_clip, group_relative
    )
    state = it.state

    def train() -> dict:
        nonlocal state
        state, metrics = step(base, state, batch)
        return metrics

    before, meter = resident_bytes(), Meter()
    gap = float(train()["parity/max_abs_diff"])
    step_seconds = timed(train)
    added = meter.stop()["peak_memory_bytes"] - before
    jax.clear_caches()
    return {
        "sample_seconds": sample_seconds,
        "step_seconds": step_seconds,
        "sample_temp_bytes": sampling.facts["temp_bytes"],
        "step_temp_bytes": facts["temp_bytes"],
        "base_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(base)),
        "step_measured_bytes": added,
        "compile_seconds": sampling.facts["compile_seconds"] + facts["compile_seconds"],
        "logprob_gap": gap,
    }


def tables(figures: Mapping, rows: Sequence[Mapping]) -> str:
    """Both as Markdown."""
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
    lines += [
        "",
        "| grows | value | sampling, s | PPO step, s | temporaries of sampler and step, MB | "
        "measured while stepping, MB | base, MB | compilation, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['axis']} | {r['value']} | {r['sample_seconds']:.3f} | {r['step_seconds']:.3f} | "
            f"{r['sample_temp_bytes'] / 1e6:.1f}, {r['step_temp_bytes'] / 1e6:.1f} | "
            f"{r['step_measured_bytes'] / 1e6:.0f} | {r['base_bytes'] / 1e6:.1f} | "
            f"{r['compile_seconds']:.1f} |"
        )
    return "\n".join(lines)


def draw_growth(rows: Sequence[dict], path: Path) -> None:
    """Seconds and bytes of each axis in a panel of its own."""
    figure = Figure(figsize=(9.6, 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(2, len(AXES))
    seconds = (("sample_seconds", "sampling"), ("step_seconds", "PPO step"))
    memory = (("step_temp_bytes", "step, compiler"), ("step_measured_bytes", "step, measured"))
    lines = (("seconds", seconds, 1), ("MB", memory, 1e6))
    for column, axis in enumerate(AXES):
        points = [row for row in rows if row["axis"] == axis]
        for axes, (label, fields, unit) in zip(panels[:, column], lines, strict=True):
            for i, (field, name) in enumerate(fields):
                y = [p[field] / unit for p in points]
                axes.plot([p["value"] for p in points], y, "o-", color=COLOURS[i], label=name)
            axes.set_xscale("log", base=2)
            axes.set(ylim=(0, None), xlabel=axis, ylabel=label if column == 0 else "")
            axes.grid(color=FAINT, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
