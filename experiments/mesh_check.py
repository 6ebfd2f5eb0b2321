"""Is a step on eight devices that of one? Sampled, scored and updated on both, and compared.

    python experiments/mesh_check.py
    python experiments/mesh_check.py --configs configs/kimi_k2.py:tiny --shapes 2x4 1x8

For each recipe the same prompts are sampled with a random adapter and trained on once, on one
device and on each mesh of simulated ones. Ids and log-probs must be equal to the bit, and the gap
between sampler and trainer exactly 0. Gradients are sums in another order: their largest error is
told, relative to the largest entry of each weight's gradient. Writes `mesh_check.json` to --out.
All six recipes take a quarter of an hour on two cores.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from orbit_jax import parity, processes, startup
from orbit_jax.config import Config, MeshConfig, from_config_dict
from orbit_jax.model.config import MeshShape
from orbit_jax.rl import advantages, losses
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts, generate

DEVICES = 8
RECIPES = (
    "kimi_k2",
    "deepseek_r1",
    "moe_1600b",
    "qwen3_235b_a22b",
    "qwen3_30b_a3b",
    "gpt_oss_120b",
)
MOST_GRADIENT_ERROR = 0.05  # of the largest entry: bf16 cotangents, summed in another order


def read(name: str, shape: MeshShape) -> Config:
    """The recipe `file.py:variant` on a mesh of that shape."""
    path, _, variant = name.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = from_config_dict(module.get_config(variant))
    return dataclasses.replace(config, mesh=MeshConfig(shape.data, shape.tensor))


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step made: rollouts, the gap, and the first moments, which are the gradients."""

    rollouts: Rollouts
    gap: float
    gradients: list[np.ndarray]


def step(config: Config) -> Step:
    """Samples a batch with a random adapter and trains on it once."""
    frozen = startup.load(config)
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)
    state = parity.perturbed(state, config.seed)
    programs = parity.build("fast", frozen.model, config)
    rng = np.random.default_rng(config.seed)
    longest = config.sampler.max_prompt_tokens
    prompts = [
        rng.integers(1, 256, rng.integers(2, longest + 1)).tolist()
        for _ in range(config.sampler.prompts_per_step)
    ]
    rollouts, _ = generate(
        programs.sample,
        programs.model,
        frozen.base,
        state.policy,
        slots,
        prompts,
        group_size=config.sampler.group_size,
        max_completion_tokens=config.sampler.max_completion_tokens,
        stop_ids=frozen.tokenizer.eos_ids,
        temperature=config.sampler.temperature,
        seed=config.seed,
        step=0,
    )
    rewards = (rollouts.tokens.sum(axis=1) % 2).astype(np.float32)
    micro = config.ppo.micro_batches
    batch = make_batch(programs.model, rollouts, rewards, micro, token_buckets(config))
    functions = losses.named(config.ppo.loss), advantages.named(config.ppo.advantage)
    state, metrics = programs.ppo_step(programs.step, frozen.base, state, batch, *functions)
    moments = [x for x in jax.tree.leaves(jax.device_get(state.optimizer)) if x.ndim]
    return Step(rollouts, float(metrics["parity/max_abs_diff"]), moments)


def compare(one: Step, other: Step) -> dict[str, float]:
    """The largest differences between a step on one device and on a mesh."""
    same = one.rollouts.sampled & other.rollouts.sampled
    errors = [
        float(np.abs(a - b).max() / np.abs(a).max())
        for a, b in zip(one.gradients, other.gradients, strict=True)
        if np.abs(a).max() > 0
    ]
    return {
        "tokens": int(one.rollouts.sampled.sum()),
        "other_ids": int((one.rollouts.tokens != other.rollouts.tokens).sum()),
        "logprobs": float(np.abs(one.rollouts.logprobs - other.rollouts.logprobs)[same].max()),
        "parity_one": one.gap,
        "parity_mesh": other.gap,
        "gradients": max(errors),
    }


def main() -> int:
    arguments = _arguments()
    processes.simulate_devices(DEVICES)
    console, rows = Console(width=110), []
    for name in arguments.configs:
        one = step(read(name, MeshShape()))
        for shape in arguments.shapes:
            found = compare(one, step(read(name, MeshShape(*map(int, shape.split("x"))))))
            rows.append({"config": name, "mesh": shape} | found)
            console.print_json(json.dumps(rows[-1]), indent=None)
    table = Table(box=None, header_style="bold")
    for head in rows[0]:
        table.add_column(head)
    for row in rows:
        table.add_row(
            *(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
        )
    console.print(table)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "mesh_check.json").write_text(json.dumps(rows, indent=2) + "\n")
    exact = ("other_ids", "logprobs", "parity_one", "parity_mesh")
    equal = not any(row[name] for row in rows for name in exact)
    return 0 if equal and all(row["gradients"] < MOST_GRADIENT_ERROR for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [f"configs/{name}.py:tiny" for name in RECIPES]
    parser.add_argument("--configs", nargs="+", default=every, help="recipes, file.py:variant")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=["2x4"],
        help="meshes, data x tensor, of up to 8",
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="of mesh_check.json")
    arguments = parser.parse_args()
    for name in arguments.configs:
        try:
            read(name, MeshShape())
        except (OSError, ValueError) as error:
            parser.error(f"--configs {name}: {error}")
    return arguments


def _shape(text: str) -> str:
    found = re.fullmatch("([1-8])x([1-8])", text)
    if not found or int(found[1]) * int(found[2]) > DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh of up to {DEVICES} devices, as 2x4")
    return text


if __name__ == "__main__":
    sys.exit(main())
