"""Rewrites `exports/` of `peft/` and `peft_oft/`: adapters of this package, for PEFT to read.

Development only: `make goldens`. Run it before `make_peft_goldens.py` and
`make_peft_oft_goldens.py`, which let PEFT load them.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.adapters.adapter import LINEAR_LAYERS, Adapter, Method, attach
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint.adapter_facts import adapter_facts
from orbit_jax.checkpoint.base import base_hash, read_config
from orbit_jax.checkpoint.layout import layout
from orbit_jax.checkpoint.write_peft import save_adapter
from orbit_jax.model.config import ModelConfig

FOLDER = Path(__file__).parent
EXPORTS, ROTATED = FOLDER / "peft" / "exports", FOLDER / "peft_oft" / "exports"
SMALL, ATTENTION = LoRA(2, 4.0), ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = tuple(f"experts.{name}_proj" for name in ("gate", "up", "down"))

# Case: the base, the adapter (method, targets, overrides), and how it is written.
CASES = {
    "dense_overrides": (
        "qwen3_tied",
        (
            SMALL,
            (*ATTENTION, "down_proj"),
            (("k_proj", LoRA(1, 4.0)), ("down_proj", LoRA(4, 2.0))),
        ),
        {},
    ),
    "rank_stabilized": (
        "qwen3_tied",
        (LoRA(8, 16.0, rank_stabilized=True), ("gate_proj", "up_proj"), ()),
        {},
    ),
    "bfloat16": ("qwen3_tied", (SMALL, LINEAR_LAYERS, ()), {"dtype": "bfloat16"}),
    "moe_per_module": ("qwen3_moe", (LoRA(1, 2.0), LINEAR_LAYERS, ()), {}),
    "moe_per_module_overrides": (
        "families/mixtral_window_tied",
        (SMALL, LINEAR_LAYERS, tuple((name, LoRA(1, 1.0)) for name in EXPERTS)),
        {},
    ),
    "moe_fused": (
        "qwen3_moe",
        (
            LoRA(1, 2.0),
            ("o_proj", *EXPERTS),
            (("experts.up_proj", SMALL), ("experts.down_proj", LoRA(2, 1.0))),
        ),
        {"layout": "fused"},
    ),
    "gpt_oss": ("families/gpt_oss_no_window_small_limit", (SMALL, LINEAR_LAYERS, ()), {}),
    "deepseek_fused": (
        "families/deepseek_v3",
        (LoRA(1, 2.0), ("kv_b_proj", "o_proj", "experts.gate_proj", "experts.up_proj"), ()),
        {"layout": "fused"},
    ),
}
# Rotations, in the same way.
ROTATIONS = {
    "series": ("qwen3_tied", (OFT(8), LINEAR_LAYERS, ()), {}),
    "exact_shared_blocks": (
        "families/deepseek_v3",
        (OFT(4, neumann_terms=0, block_share=True), ("q_b_proj", "q_a_proj", "o_proj"), ()),
        {},
    ),
}


@functools.cache
def base_of(case: str) -> tuple[ModelConfig, dict, str]:
    """Config, shapes of the weights and hash of a case's base."""
    path = FOLDER / (CASES | ROTATIONS)[case][0]
    config = read_config(path)
    return config, shapes_of(config), base_hash(path)


def shapes_of(config: ModelConfig) -> dict:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*leaf.lead, *leaf.shape), jnp.float32), layout(config)
    )


def adapter_of(case: str) -> Adapter:
    return drawn(base_of(case)[1], *(CASES | ROTATIONS)[case][1])


def drawn(base: dict, method: Method, targets: tuple[str, ...], overrides: tuple = ()) -> Adapter:
    """An adapter whose values are quarters, of rotations sixteenths, drawn weight by weight."""
    shapes = jax.eval_shape(
        lambda base: attach(method, jax.random.key(0), base, targets, overrides), base
    )
    rng, parts = np.random.default_rng(0), 16 if isinstance(method, OFT) else 4
    return jax.tree.map(
        lambda leaf: (rng.integers(-4, 5, leaf.shape) / parts).astype(np.float32), shapes
    )


def write(case: str, folder: Path) -> None:
    base, _, settings = (CASES | ROTATIONS)[case]
    config, _, digest = base_of(case)
    facts = adapter_facts(
        config, FOLDER / base, adapter_of(case), base=base, base_hash=digest, step=3
    )
    save_adapter(folder, adapter_of(case), config, facts, **settings)


if __name__ == "__main__":
    for case in CASES:
        write(case, EXPORTS / case)
    for case in ROTATIONS:
        write(case, ROTATED / case)
