"""Loading a GGUF file as a frozen base, bit for bit and without widening.

As with a Hugging Face folder, every tensor is accounted for, with its type and shape, before the
first byte of a weight is touched; then leaves are filled one after another from maps of the file.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.checkpoint.common import few, file_digest
from orbit_jax.checkpoint.gguf_config import read_config as metadata_config
from orbit_jax.checkpoint.gguf_file import GGUFFile, open_gguf
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.placing import DEFAULT_PLACEMENT, Placement, fill
from orbit_jax.checkpoint.stacks import split
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor

# Hugging Face module names, as the layout spells them, to GGUF's.
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_base(
    path: str | Path, placement: Placement = DEFAULT_PLACEMENT
) -> tuple[ModelConfig, dict]:
    """Loads a GGUF file of the `llama` architecture.

    Args:
      path: one file, of types that `gguf_blocks.TYPES` lists.
      placement: where arrays lie and whom to tell how far loading is.

    Returns:
      The config and the base, of the structure that `huggingface.load_base` returns.

    Raises:
      ValueError: if the file is missing or broken, if its architecture is not supported, or if a
        tensor is missing, unknown or of another shape or type than the metadata imply.
    """
    file = open_gguf(path)
    config = _config(file)
    done, total = 0, sum(tensor.nbytes for tensor in file.tensors.values())

    def told(bytes_read: int) -> None:
        nonlocal done
        done += bytes_read
        if placement.progress is not None:
            placement.progress(done, total)

    def load(path: tuple, leaf: Leaf) -> QTensor | jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = (*leaf.lead, *leaf.shape)
        return fill(name, shape, _pieces(leaf, _rows(config, leaf), file), placement, told)

    return config, jax.tree_util.tree_map_with_path(load, layout(config))


def read_config(path: str | Path) -> ModelConfig:
    """What the metadata and the types of the tensors say, before any weight is read.

    Raises:
      ValueError: as `load_base`.
    """
    return _config(open_gguf(path))


def base_hash(path: str | Path) -> str:
    """sha256 of the file: ties an adapter to its base.

    Raises:
      ValueError: if the file is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is missing: check the path")
    return file_digest(path)


def tensor_name(module: str) -> str:
    """The tensor that holds the weight of a Hugging Face module."""
    layer = re.match(r"model\.layers\.(\d+)\.", module)
    if layer is None:
        return f"{_TOP[module]}.weight"
    return f"blk.{layer[1]}.{_LAYER[module[layer.end() :]]}.weight"


def _config(file: GGUFFile) -> ModelConfig:
    config = metadata_config(file)
    _check_tensors(file, jax.tree.leaves(layout(config)))
    return split(config, lambda leaf, module: file.tensors[tensor_name(module)].type.name, str)


def _check_tensors(file: GGUFFile, leaves: list[Leaf]) -> None:
    """Every expected tensor is there with its shape and type, and there is no other."""
    expected, wrong = set(), []
    for leaf in leaves:
        for name in map(tensor_name, leaf.modules):
            expected.add(name)
            if name not in file.tensors:
                continue
            tensor = file.tensors[name]
            if tensor.shape != leaf.shape:
                wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(leaf.shape)}")
            elif leaf.kind == "Vector" and not tensor.type.is_float:
                wrong.append(f"{name} has type {tensor.type.name}, not F32, F16 or BF16")
    faults = {
        "missing": sorted(expected - file.tensors.keys()),
        "unknown": sorted(file.tensors.keys() - expected),
        "wrong": wrong,
    }
    found = "; ".join(f"{what}: {few(names)}" for what, names in faults.items() if names)
    if found:
        raise ValueError(
            f"{file.path}: the tensors are not those that its metadata imply ({found}): use a file "
            "of an unmodified llama model"
        )


def _rows(config: ModelConfig, leaf: Leaf) -> np.ndarray | None:
    """For each row of a query or key weight, the row of the file that holds it.

    llama.cpp rotates neighbours, Hugging Face the two halves of a head: the rows of a head lie as
    `[hd/2, 2]` in the file and as `[2, hd/2]` here.
    """
    name = leaf.modules[0].rpartition(".")[2]
    if name not in ("q_proj", "k_proj"):
        return None
    rows = np.arange(leaf.shape[0]).reshape(-1, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _pieces(
    leaf: Leaf, rows: np.ndarray | None, file: GGUFFile
) -> Iterator[tuple[tuple[int, ...], QTensor | np.ndarray, int]]:
    """The weights of a leaf one after another, as `placing.fill` takes them."""
    for index, module in zip(np.ndindex(leaf.lead), leaf.modules, strict=True):
        tensor = file.tensors[tensor_name(module)]
        weight = tensor.type.unpack(tensor.map())
        if rows is not None:
            weight = jax.tree.map(lambda field: field[rows], weight)
        if leaf.kind == "Vector":
            weight = weight.codes.view(jnp.dtype(weight.format))
        yield index, weight, tensor.nbytes
