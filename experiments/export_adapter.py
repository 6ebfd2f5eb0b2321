"""Writes what a run learned as files that others load.

    python experiments/export_adapter.py runs/ppo_math-... exported
    python experiments/export_adapter.py runs/ppo_math-.../checkpoints/step_000100 exported
    python experiments/export_adapter.py runs/ppo_math-... exported --layout fused --dtype bfloat16
    python experiments/export_adapter.py runs/ppo_math-... merged --merged

A PEFT folder by default, which names the base and its hash; with `--merged` a bf16 checkpoint of
base and update together. Of a run, the newest checkpoint is taken. Needs no accelerator.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp

from orbit_jax import startup
from orbit_jax.adapters.adapter import Adapter
from orbit_jax.checkpoint import run_state
from orbit_jax.checkpoint.adapter_facts import adapter_facts
from orbit_jax.checkpoint.base import base_hash, find_base, read_config
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.huggingface import open_base
from orbit_jax.checkpoint.write_merged import save_merged
from orbit_jax.checkpoint.write_peft import DTYPES, LAYOUTS, save_adapter
from orbit_jax.config import Config, from_config_dict
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.weights import weights
from orbit_jax.runs.progress import Progress
from orbit_jax.trained import find_checkpoint


@dataclasses.dataclass(frozen=True)
class Trained:
    """The policy of a checkpoint, and the base that it belongs to.

    Attributes:
      base: path of the base, as the run's config spells it; hash: of it.
    """

    model: ModelConfig
    base: str
    hash: str
    adapter: Adapter
    step: int


def read_trained(source: Path, base: str = "") -> Trained:
    """Reads a run's policy; `base` says where the base lies now, if it has moved."""
    run, checkpoint = find_checkpoint(source)
    config: Config = from_config_dict(json.loads((run / "config.json").read_text()))
    if config.base.weights == "random":
        raise ValueError(
            f"{run} is a rehearsal: its base was random, so that no model has a use for its "
            "adapter: train on a checkpoint"
        )
    base = base or config.base.path
    path = find_base(base)
    model = read_config(path)
    frozen = startup.Frozen(model, shapes(model), None, 0, 0, base_hash(path))
    state = jax.eval_shape(functools.partial(startup.train_state, config, frozen))
    state, facts = run_state.restore(checkpoint, state)
    if facts["base_hash"] != frozen.hash:
        raise ValueError(
            f"{checkpoint} was trained on the base with hash {facts['base_hash']}, {path} has "
            f"{frozen.hash}: name the right one with --base"
        )
    run_state.check_adapter(facts, state.policy.methods)
    return Trained(model, base, frozen.hash, state.policy, facts["step"])


def shapes(model: ModelConfig) -> dict:
    """The base's shapes, which are all that adapters depend on."""
    return jax.tree.map(
        lambda w: jax.ShapeDtypeStruct((*w.lead, *w.shape), jnp.float32), weights(model)
    )


def wrapper_of(base: Path) -> str:
    """What stands before the names of the language model's weights, as `language_model.`."""
    refs = {} if is_gguf(base) else open_base(base).refs
    return next((ref.name.removesuffix(name) for name, ref in refs.items()), "")


def export(
    source: Path,
    out: Path,
    layout: str = "per_module",
    dtype: str = "float32",
    merged: bool = False,
    base: str = "",
) -> Trained:
    """Writes the adapter of `source`, or base and adapter together, to the new folder `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists: name a new folder")
    find_checkpoint(source)
    print("reading the base, for its hash ...", flush=True)
    trained = read_trained(source, base)
    facts = adapter_facts(
        trained.model,
        find_base(trained.base),
        trained.adapter,
        base=trained.base,
        base_hash=trained.hash,
        step=trained.step,
    )
    if not merged:
        save_adapter(
            out,
            trained.adapter,
            trained.model,
            facts,
            layout=layout,
            dtype=dtype,
            wrapper=wrapper_of(find_base(trained.base)),
        )
        print(
            f"{out}: the adapter after step {trained.step}, on "
            f"{', '.join(facts['adapted_weights'])}; it belongs to {trained.base} "
            f"(hash {trained.hash})"
        )
        if layout == "per_module" and some_of_experts(facts["adapted_weights"]):
            print(
                "note: of the experts some weights alone are adapted, which PEFT 0.21 under "
                "transformers 5 leaves out with a warning, or refuses; serving engines read it: "
                "for PEFT export with --layout fused"
            )
        if trained.model.num_experts and any(_beside_experts(n) for n in facts["adapted_weights"]):
            print(
                "note: PEFT 0.19 to 0.21 under transformers 5 leaves the update of dense and "
                "shared feed-forward layers out (its issue 3711); a later PEFT and serving "
                "engines read it"
            )
        return trained
    with Progress(len(jax.tree.leaves(weights(trained.model))), log=_nowhere) as progress:
        save_merged(
            out,
            find_base(trained.base),
            trained.adapter,
            tell=lambda done, _: progress.update(done, {}),
        )
    print(
        f"{out}: base and adapter after step {trained.step} as one bf16 checkpoint; its log-probs "
        "agree with those of training within bf16, not bit for bit: base + adapter does"
    )
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--layout", choices=LAYOUTS, default="per_module", help="keys of experts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the adapter")
    parser.add_argument("--merged", action="store_true", help="write base and update together")
    parser.add_argument("--base", default="", help="where the base lies, if it has moved")
    arguments = parser.parse_args()
    try:
        export(**vars(arguments))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def some_of_experts(names: Iterable[str]) -> bool:
    """Whether experts' gate and up are adapted otherwise than both, and together with down."""
    adapted = {name.rpartition(".")[2] for name in names if "experts" in name.split(".")}
    return bool(adapted) and adapted not in (
        {"down_proj"},
        {"gate_proj", "up_proj", "down_proj"},
    )


def _beside_experts(name: str) -> bool:
    """Whether a weight is of a feed-forward part that is no routed expert."""
    return ".mlp." in name and ".experts." not in name


def _nowhere(_: str) -> None:
    """There is no run folder whose log would take the lines."""


if __name__ == "__main__":
    main()
