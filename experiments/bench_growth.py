"""How seconds and bytes grow with batch, length, experts and layers, for `bench.py`.

A point is one model of random weights with one batch: its two programs are compiled, which tells
the bytes that the compiler sets aside, and run.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import psutil
from bench_figures import Sampling, compiled, subject, timed
from matplotlib.figure import Figure
from rivals.worker import Meter

from orbit_jax.config import Config, OptimizerConfig, PPOConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.init import freeze, init_weights
from orbit_jax.model.rope import Rope
from orbit_jax.rl.advantages import grpo
from orbit_jax.rl.batch import Bucket, make_batch
from orbit_jax.rl.losses import ppo_clip
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
    rope=Rope(1e4),
    max_positions=4096,
    tie_word_embeddings=True,
    qk_norm="head",
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
    base = jax.jit(lambda key: freeze(model, init_weights(model, key)))(jax.random.key(0))
    it = subject(config, model, base)
    sampling = Sampling(it, rows, tokens // 2, tokens // 2)
    sample_seconds = timed(lambda: sampling.run(tokens // 2))
    bucket = Bucket(rows * tokens, rows * (tokens // 2))
    batch = make_batch(it.model, sampling.rollouts(), np.arange(rows) % 2, 1, (bucket,))
    step, facts = compiled(
        it.programs.ppo_step, it.programs.step, base, it.state, batch, ppo_clip, grpo
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


def growth_table(rows: Sequence[Mapping]) -> str:
    """As Markdown."""
    lines = [
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


def resident_bytes() -> int:
    """Of this process, once freed memory has gone back to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
    return psutil.Process().memory_info().rss
