"""What a checkpoint holds and whether it would load, told by its headers.

No weight is read. Besides headers, only what decides how weights are read is: shapes that tensors
repeat, the groups of GPTQ's columns, and a head that a tied embedding stands beside, which must
equal it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from orbit_jax.adapters.adapter import LINEAR_LAYERS
from orbit_jax.adapters.footprint import Footprint, footprint
from orbit_jax.adapters.lora import LoRA
from orbit_jax.adapters.oft import OFT
from orbit_jax.checkpoint import gguf, gguf_config, huggingface
from orbit_jax.checkpoint.common import few
from orbit_jax.checkpoint.config_words import describe
from orbit_jax.checkpoint.gguf_file import is_gguf, open_gguf
from orbit_jax.checkpoint.language_tensors import unread_part
from orbit_jax.checkpoint.quantization import read_quantization
from orbit_jax.checkpoint.safetensors_io import (
    TensorRef,
    expected_files,
    open_file,
    read_json,
)
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.checkpoint.weight_table import WeightGroup, of_folder, of_gguf
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.weights import weights


@dataclass(frozen=True)
class Unread:
    """Tensors that are left out on purpose: a part of the model that is not needed."""

    part: str
    tensors: tuple[str, ...]
    file_bytes: int


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer beside the weights; `refusal` says why it cannot be used, or is empty."""

    ids: int = 0
    eos_ids: tuple[int, ...] = ()
    has_chat_template: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
      refusals: why it would not load, a sentence each; empty if it would.
      config: of the model, where it is supported; description: the same in words.
      weights: empty unless it would load, as are the figures that follow from them.
      active_parameters: see `WeightGroup`.
      file_bytes: of the files; read_bytes: of the tensors that are read; packed_bytes: of the base.
      adapter: where it was asked for and can be attached; adapter_refusal: why not, or empty.
      left_alone: matrices that the adapter is not on.
    """

    path: str
    kind: str
    files: int
    file_bytes: int
    refusals: tuple[str, ...]
    config: ModelConfig | None
    description: dict[str, str]
    tokenizer: TokenizerFacts
    weights: tuple[WeightGroup, ...] = ()
    unread: tuple[Unread, ...] = ()
    parameters: int = 0
    active_parameters: int = 0
    read_bytes: int = 0
    packed_bytes: int = 0
    adapter: Footprint | None = None
    adapter_refusal: str = ""
    left_alone: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether loading would succeed."""
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {"loads": self.loads} | dataclasses.asdict(self)


def inspect(
    path: str | Path, method: LoRA | OFT | None = None, targets: tuple[str, ...] = LINEAR_LAYERS
) -> Inspection:
    """Reads the headers of a Hugging Face folder or a GGUF file.

    Args:
      method: an adapter that is asked about; targets: what it is attached to, as of `attach`.
    """
    path = Path(path)
    found = _gguf(path) if is_gguf(path) else _folder(path)
    total = {
        "parameters": sum(group.parameters for group in found.weights),
        "active_parameters": sum(group.active_parameters for group in found.weights),
        "read_bytes": sum(group.file_bytes for group in found.weights),
        "packed_bytes": sum(group.packed_bytes for group in found.weights),
    }
    found = dataclasses.replace(found, **total)
    return found if method is None else _with_adapter(found, method, targets)


def _folder(folder: Path) -> Inspection:
    contents, refusals = _tried(lambda: huggingface.open_base(folder))
    config = contents.config if contents else None
    if contents is None:
        config, more = _config_and_refusals(folder)
        # The first fault is among all of them, unless only tensors and config together show it.
        refusals = more or refusals
    files = list(_present_files(folder))
    return Inspection(
        path=str(folder),
        kind="Hugging Face folder",
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        refusals=tuple(refusals),
        config=config,
        description=describe(config) if config else {},
        tokenizer=_tokenizer(folder, config),
        weights=of_folder(contents) if contents else (),
        unread=_unread(contents) if contents else (),
    )


def _gguf(path: Path) -> Inspection:
    config, refusals = _tried(lambda: gguf.read_config(path))
    file, _ = _tried(lambda: open_gguf(path))
    known = config
    if config is None and file is not None:  # tensors may be wrong where the metadata are not
        known, _ = _tried(lambda: gguf_config.read_config(file))
    return Inspection(
        path=str(path),
        kind="GGUF file",
        files=int(path.is_file()),
        file_bytes=path.stat().st_size if path.is_file() else 0,
        refusals=tuple(refusals),
        config=known,
        description=describe(known) if known else {},
        tokenizer=_tokenizer(path, known),
        weights=of_gguf(config, file) if config else (),
    )


def _config_and_refusals(folder: Path) -> tuple[ModelConfig | None, list[str]]:
    """The parts of loading that do not depend on each other, each tried by itself."""
    hf, refusals = _tried(lambda: read_json(folder / "config.json"))
    config = None
    if hf is not None:
        config, more = _tried(lambda: ModelConfig.from_hf(hf))
        refusals += more + _tried(lambda: read_quantization(folder, hf))[1]
    files, more = _tried(lambda: expected_files(folder))
    if files is None:
        return config, [*more, *refusals] if folder.is_dir() else more
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        refusals.append(
            f"{folder}: {len(missing)} of {len(files)} weight files are missing ({few(missing)}): "
            "download the checkpoint again"
        )
    for file in files:
        if file.is_file():
            refusals += _tried(lambda file=file: open_file(file))[1]
    return config, refusals


def _present_files(folder: Path) -> Iterator[Path]:
    files, _ = _tried(lambda: expected_files(folder))
    return (file for file in files or () if file.is_file())


def _unread(contents: huggingface.Contents) -> tuple[Unread, ...]:
    parts: dict[str, list[TensorRef]] = {}
    for name, ref in contents.unread.items():
        parts.setdefault(unread_part(name), []).append(ref)
    return tuple(
        Unread(part, tuple(ref.name for ref in refs), sum(ref.nbytes for ref in refs))
        for part, refs in sorted(parts.items())
    )


def _tokenizer(path: Path, config: ModelConfig | None) -> TokenizerFacts:
    tokenizer, refusals = _tried(lambda: Tokenizer.load(path))
    if tokenizer is None:
        return TokenizerFacts(refusal=refusals[0])
    refusal = ""
    if config and tokenizer.vocab_size > config.vocab_size:
        refusal = (
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: the "
            "files belong to different models"
        )
    return TokenizerFacts(
        tokenizer.vocab_size, tokenizer.eos_ids, bool(tokenizer.templates), refusal
    )


def _with_adapter(found: Inspection, method: LoRA | OFT, targets: tuple[str, ...]) -> Inspection:
    if found.config is None:
        return found
    width = found.config.hidden_size
    if isinstance(method, LoRA) and method.rank > width:
        sentence = f"adapter.rank={method.rank} exceeds the model's width {width}: lower it"
        return dataclasses.replace(found, adapter_refusal=sentence)
    tree = weights(found.config)
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct((*w.lead, *w.shape), jnp.float32), tree)
    adapter, refusals = _tried(lambda: footprint(method, shapes, targets))
    if adapter is None:
        return dataclasses.replace(found, adapter_refusal=refusals[0])
    rest: dict[str, None] = {}
    for path, weight in jax.tree_util.tree_leaves_with_path(tree):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if weight.kind != "Vector":
            rest[".".join(names[1:] or names)] = None
    left_alone = rest.keys() - {weight.name for weight in adapter.weights}
    return dataclasses.replace(found, adapter=adapter, left_alone=tuple(sorted(left_alone)))


def _tried(read: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `read` gives and nothing against it, or None and what it raises as a sentence.

    Whatever a broken file makes a reader raise is an answer here, so that nothing is let through.
    """
    try:
        return read(), []
    except (ValueError, OSError) as error:
        return None, [str(error)]
    except Exception as error:
        return None, [f"reading ends in {type(error).__name__}: {error}"]
