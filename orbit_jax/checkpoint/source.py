"""Where a run's base comes from: a checkpoint, or random weights for a rehearsal of one."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax

from orbit_jax.checkpoint import base, rehearsal
from orbit_jax.checkpoint.byte_tokenizer import VOCAB_SIZE
from orbit_jax.checkpoint.gguf_file import is_gguf
from orbit_jax.checkpoint.placing import Placement
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE
from orbit_jax.checkpoint.tokenizer import Tokenizer
from orbit_jax.model.config import ModelConfig

_BYTES = Path(__file__).parents[1] / "assets/tiny_moe_int4"  # whose tokenizer has a token a byte
_TOKENIZERS = ("tokenizer.json", "tiktoken.model")


class Source(Protocol):
    """A base before it is loaded; what cannot be read raises `ValueError`."""

    path: Path

    def config(self) -> ModelConfig:
        """What kind of model it is."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...

    def nbytes(self) -> int:
        """Bytes of its weights, before any is read."""
        ...

    def hash(self) -> str:
        """What ties adapters and checkpoints of a run to it."""
        ...

    def load(self, placement: Placement) -> dict:
        """The weights, as `load_base` returns them."""
        ...


def source_of(path: str | Path, weights: str = "checkpoint", seed: int = 0) -> Source:
    """The base of a config.

    Args:
      path: as `base.path`; weights: as `base.weights`, `checkpoint` or `random`; seed: of random
        weights.

    Raises:
      ValueError: if the path holds no weights and they are not to be random, or the other way
        round if it is no folder with a `config.json`.
    """
    found = base.find_base(path)
    if weights == "random":
        if is_gguf(found):
            raise ValueError(
                f"config.base.weights='random' with base.path={str(path)!r}: a GGUF file holds its "
                "weights: name a folder with a config.json, or set base.weights to 'checkpoint'"
            )
        return Rehearsal(found, seed)
    has_weights = (found / SINGLE_FILE).is_file() or (found / INDEX_FILE).is_file()
    if (found / "config.json").is_file() and not has_weights:
        raise ValueError(
            f"config.base.path={str(path)!r}: the folder has a config.json and no weights: "
            "download the checkpoint and name its folder, or set base.weights to 'random' for a "
            "rehearsal"
        )
    return Checkpoint(found)


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder or a GGUF file."""

    path: Path

    def config(self) -> ModelConfig:
        """By the headers of the files."""
        return base.read_config(self.path)

    def tokenizer(self) -> Tokenizer:
        """Of the folder or in the file."""
        return Tokenizer.load(self.path)

    def nbytes(self) -> int:
        """Of the files."""
        return base.checkpoint_bytes(self.path)

    def hash(self) -> str:
        """Over the files."""
        return base.base_hash(self.path)

    def load(self, placement: Placement) -> dict:
        """Reads the files."""
        return base.load_base(self.path, placement)[1]


@dataclass(frozen=True)
class Rehearsal:
    """Random weights in the structure of a folder's `config.json`; no checkpoint is needed."""

    path: Path
    seed: int

    def config(self) -> ModelConfig:
        """By the `config.json`."""
        return rehearsal.abstract_base(self.path)[0]

    def tokenizer(self) -> Tokenizer:
        """The folder's, or else one with a token for each byte."""
        if any((self.path / name).is_file() for name in _TOKENIZERS):
            return Tokenizer.load(self.path)
        rows = self.config().vocab_size
        if rows < VOCAB_SIZE:
            raise ValueError(
                f"{self.path} has no tokenizer and vocab_size={rows}, too small for the byte "
                f"tokenizer's {VOCAB_SIZE} ids: put a tokenizer.json there"
            )
        return Tokenizer.load(_BYTES)

    def nbytes(self) -> int:
        """Of the base."""
        leaves = jax.tree.leaves(rehearsal.abstract_base(self.path)[1])
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def hash(self) -> str:
        """Over the `config.json` and the seed."""
        return rehearsal.random_hash(self.path, self.seed)

    def load(self, placement: Placement) -> dict:
        """Draws the weights."""
        return rehearsal.random_base(self.path, self.seed, placement)[1]
