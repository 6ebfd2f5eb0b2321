"""Loading a GGUF file as a frozen base, bit for bit and without widening.

As with a Hugging Face folder, every tensor is accounted for, with its type and shape, before the
first byte of a weight is touched; then leaves are filled one after another from maps of the file.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax.checkpoint.common import Put, allocate, few, file_digest, to_default_device
from orbit_jax.checkpoint.gguf_config import read_config
from orbit_jax.checkpoint.gguf_file import GGUFFile, open_gguf
from orbit_jax.checkpoint.layout import Leaf, layout
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


def load_base(path: str | Path, put: Put | None = None) -> tuple[ModelConfig, dict]:
    """Loads a GGUF file of the `llama` architecture.

    Args:
      path: one file, of types that `gguf_blocks.TYPES` lists.
      put: places one host array on the devices, given its path in the base (as
        `layers.0.self_attn.q_proj.codes`); without one, the default device takes it.

    Returns:
      The config and the base, of the structure that `huggingface.load_base` returns.

    Raises:
      ValueError: if the file is missing or broken, if its architecture is not supported, if a
        tensor is missing, unknown or of another shape or type than the metadata imply, or if the
        layers of one stack differ in type.
    """
    file = open_gguf(path)
    config = read_config(file)
    tree = layout(config)
    _check_tensors(file, jax.tree.leaves(tree))

    def load(path: tuple, leaf: Leaf) -> QTensor | jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _load(name, leaf, _rows(config, leaf), file, put or to_default_device)

    return config, jax.tree_util.tree_map_with_path(load, tree)


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
    for leaf in leaves:
        first, *others = (file.tensors[tensor_name(module)] for module in leaf.modules)
        for other in others:
            if other.type != first.type:
                raise ValueError(
                    f"{file.path}: {other.name} is {other.type.name} but {first.name} is "
                    f"{first.type.name}: layers that run as one stack must share a type, quantise "
                    "the model with llama-quantize --pure"
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


def _load(
    name: str, leaf: Leaf, rows: np.ndarray | None, file: GGUFFile, put: Put
) -> QTensor | jax.Array:
    for i, module in enumerate(leaf.modules):
        tensor = file.tensors[tensor_name(module)]
        fields, structure = jax.tree.flatten(tensor.type.unpack(tensor.map()))
        if i == 0:
            stacks = [allocate((len(leaf.modules), *f.shape), f.dtype) for f in fields]
        for stack, field in zip(stacks, fields, strict=True):
            stack[i] = field if rows is None else field[rows]
    stacks = [stack.reshape(*leaf.lead, *stack.shape[1:]) for stack in stacks]
    weight = jax.tree.unflatten(structure, stacks)
    if leaf.kind == "Vector":
        return put(name, weight.codes.view(jnp.dtype(weight.format)))

    def place(path: tuple, field: np.ndarray) -> jax.Array:
        return put(f"{name}.{jax.tree_util.keystr(path, simple=True, separator='.')}", field)

    return jax.tree_util.tree_map_with_path(place, weight)
