"""Writing base and adapter as one bf16 checkpoint, weight by weight.

Every file is laid out first, then filled through a map while the base is read: the host holds one
packed and one widened weight, and the file system the rest.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from orbit_jax.adapters.adapter import Adapter, Method, at
from orbit_jax.checkpoint.common import copy_tokenizer
from orbit_jax.checkpoint.huggingface import Contents, open_base
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.leaf_tensors import pieces, tensor_name
from orbit_jax.checkpoint.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    open_file,
    read_json,
    write_safetensors,
)
from orbit_jax.checkpoint.scheme import PLAIN
from orbit_jax.quant.qtensor import QTensor, dequantize

MAX_SHARD_BYTES = 5_000_000_000
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_Plan = dict[str, tuple[np.dtype, tuple[int, ...]]]


def save_merged(
    folder: str | Path,
    base_folder: str | Path,
    adapter: Adapter,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes a Hugging Face folder whose weights are base + update, rounded to bf16 once.

    Quantised and adapted weights become bf16; all others are copied as they are, head and
    embedding among them, so that a tied pair stays tied. Log-probs agree with those of training
    within bf16 only: training never rounds the sum.

    Args:
      folder: made if it is missing.
      base_folder: of the base; the files of its tokenizer are copied.
      adapter: of any method.
      max_shard_bytes: of one file; a larger tensor has a file of its own.
      tell: called with the number of stacks of weights that are done, and of all.

    Raises:
      ValueError: if the base is no Hugging Face folder, cannot be read, or has more in it than a
        language model.
    """
    folder, base_folder = Path(folder), Path(base_folder)
    hf = _plain_config(base_folder)
    contents = open_base(base_folder)
    leaves = list(_leaves(contents, adapter))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _lay_out(folder, _plan(contents, leaves), max_shard_bytes)
    merge = jax.jit(_merged, static_argnames=("method", "dtype"))
    for i, (leaf, method, params) in enumerate(leaves):
        for index, weight in _weights(contents, leaf):
            target = _place(leaf, index, tensors)
            update = jax.tree.map(lambda p, index=index: _own(p, index), params)
            target[...] = merge(weight, update, method=method, dtype=target.dtype)
        tell(i + 1, len(leaves))
    text = json.dumps(hf, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    copy_tokenizer(base_folder, folder)


def _plain_config(base_folder: Path) -> dict:
    """The base's `config.json` as that of a bf16 checkpoint."""
    if not base_folder.is_dir():
        raise ValueError(
            f"{base_folder} is no Hugging Face folder, so a merged checkpoint would have no "
            "config.json and no tokenizer: export the adapter alone"
        )
    hf = read_json(base_folder / "config.json")
    if "text_config" in hf:
        raise ValueError(
            f"{base_folder}: model_type={hf.get('model_type')!r} has more in it than the language "
            "model that is loaded here: export the adapter alone"
        )
    hf = {name: value for name, value in hf.items() if name != "quantization_config"}
    dtype = "torch_dtype" if "torch_dtype" in hf else "dtype"
    # Layers that draft further tokens are not loaded, so they are not written.
    drafts = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in hf else {}
    return hf | {dtype: "bfloat16"} | drafts


def _leaves(contents: Contents, adapter: Adapter) -> Iterator[tuple[Leaf, Method | None, dict]]:
    """Every leaf with the method and the host parameters that are attached to it, if any."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(contents.layout):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][1:]
        stack = next((key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)), None)
        params = None if stack is None else at(adapter.params["layers"][stack], *names)
        method = adapter.method_at(*names) if params else None
        yield leaf, method, jax.device_get(params or {})


def _weights(contents: Contents, leaf: Leaf) -> Iterator[tuple[tuple[int, ...], object]]:
    """Each weight of a leaf, with its index in the stack."""
    depth = len(leaf.lead)
    found = pieces(leaf, contents.scheme[leaf], contents.refs)
    for index, parts in itertools.groupby(found, lambda piece: piece[0][:depth]):
        parts = [piece for _, piece, _ in parts]  # of rows, where a plain weight is large
        yield index, parts[0] if len(parts) == 1 else jax.tree.map(_stacked, *parts)


def _own(params: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """A weight's own part of the parameters of a stack; experts may share one."""
    layer, *expert = index
    return params[layer, *(e if params.shape[1] > 1 else 0 for e in expert)]


def _stacked(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def _merged(weight, update: dict, method: Method | None, dtype: np.dtype) -> jax.Array:
    """One weight as it is written."""
    if method is not None:
        return method.merge(update, dequantize(weight, jnp.float32)).astype(dtype)
    return dequantize(weight, dtype) if isinstance(weight, QTensor) else weight


def _plan(contents: Contents, leaves: list[tuple[Leaf, Method | None, dict]]) -> _Plan:
    """Type and shape of every tensor, in the order of the base."""
    plan: _Plan = {}
    for leaf, method, _ in leaves:
        plain = leaf.kind == "Vector" or contents.scheme[leaf] == PLAIN
        shape = leaf.shape
        if leaf.fused:  # experts in front, inputs before outputs
            step = leaf.rows[1] if leaf.rows else 1
            shape = (leaf.lead[1], *reversed((shape[0] * step, *shape[1:])))
        for module in leaf.modules:
            name = tensor_name(leaf, module, "weight")
            rounded = not plain or method is not None
            dtype = _BFLOAT16 if rounded else contents.refs[name].dtype
            # Of weights that share a tensor, one that is adapted makes it bf16.
            if name not in plan or rounded:
                plan[name] = dtype, shape
    return plan


def _lay_out(folder: Path, plan: _Plan, max_bytes: int) -> dict[str, np.ndarray]:
    """Makes the files and returns every tensor as a map to write to."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = total = 0
    for name, (dtype, shape) in plan.items():
        zeros = np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory
        if size and size + zeros.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = zeros
        size, total = size + zeros.nbytes, total + zeros.nbytes
    maps, weight_map = {}, {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        path = folder / (file if len(shards) > 1 else SINGLE_FILE)
        write_safetensors(path, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        for name, ref in open_file(path).items():
            maps[name] = np.memmap(path, ref.dtype, "r+", offset=ref.start, shape=ref.shape)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")
    return maps


def _place(leaf: Leaf, index: tuple[int, ...], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Where the weight at `index` of a stack is written."""
    if not leaf.fused:
        i = int(np.ravel_multi_index(index, leaf.lead)) if index else 0
        return tensors[tensor_name(leaf, leaf.modules[i], "weight")]
    layer, expert = index
    rows = slice(None) if leaf.rows is None else slice(leaf.rows[0], None, leaf.rows[1])
    return tensors[tensor_name(leaf, leaf.modules[layer], "weight")][expert].T[rows]
