"""Writing base and adapter as one bf16 checkpoint, matrix by matrix.

Every shard is laid out first, then filled through a map while the base streams by: the host holds
one leaf of the packed base and one widened matrix, and the file system the rest.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.checkpoint.base import load_base
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.safetensors_io import (
    INDEX_FILE,
    SINGLE_FILE,
    open_file,
    read_json,
    write_safetensors,
)
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor, dequantize

MAX_SHARD_BYTES = 5_000_000_000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")


def save_merged(
    folder: str | Path,
    base_folder: str | Path,
    base: dict,
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
      base_folder: of the base; its tokenizer and other files are copied.
      base: as `load_base` returns it; its arrays may be abstract.
      adapter: of any method.
      max_shard_bytes: of one file; a larger tensor has a file of its own.
      tell: called with the number of weights done and of all.

    Raises:
      ValueError: if the base is no Hugging Face folder, or has more in it than a language model.
    """
    folder, base_folder = Path(folder), Path(base_folder)
    hf = _plain_config(base_folder)
    config = ModelConfig.from_hf(hf)
    leaves = _named(layout(config))
    weights = _named(base, is_leaf=_is_weight)
    params = _params(adapter)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _lay_out(folder, _plan(leaves, weights, params), max_shard_bytes)
    merge = jax.jit(_merged, static_argnames="method")
    waiting: dict[str, dict[str, np.ndarray]] = {}
    done = 0

    def put(name: str, array: np.ndarray) -> jax.ShapeDtypeStruct:
        nonlocal done
        leaf = name if name in leaves else name.rpartition(".")[0]
        fields = _named(weights[leaf])
        waiting.setdefault(leaf, {})[name.removeprefix(leaf).removeprefix(".")] = array
        if waiting[leaf].keys() == fields.keys():
            arrays = waiting.pop(leaf)
            whole = jax.tree.unflatten(jax.tree.structure(weights[leaf]), map(arrays.get, fields))
            method, update = params.get(leaf, (None, None))
            for index, target in _places(leaves[leaf], shards):
                target[...] = merge(*_at(index, (whole, update)), method=method)
            done += 1
            tell(done, len(leaves))
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    load_base(base_folder, put)
    text = json.dumps(hf, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    for path in sorted(base_folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


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


def _at(index: tuple[int, ...], tree):
    return jax.tree.map(lambda x: x[index], tree)


def _merged(weight, update, method):
    """One weight as it is written; with neither codes nor an update, as it was stored."""
    if update is not None:
        wide = dequantize(weight, jnp.float32) if _is_weight(weight) else weight
        return method.merge(update, wide).astype(jnp.bfloat16)
    if not _is_weight(weight):
        return weight
    if weight.scales is not None:
        return dequantize(weight, jnp.bfloat16)
    return dequantize(weight, _stored_dtype(weight))


def _plan(leaves: dict, weights: dict, params: dict) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor, in the order of the base."""
    plan: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, leaf in leaves.items():
        weight = weights[name]
        rounded = name in params or (_is_weight(weight) and weight.scales is not None)
        dtype = BFLOAT16 if rounded else _stored_dtype(weight)
        for module in leaf.modules:
            tensor = f"{module}.{leaf.parameter}"
            shape = leaf.shape
            if leaf.fused:  # experts in front, inputs before outputs
                shape = (leaf.lead[1], *reversed(shape))
                if leaf.rows is not None:
                    shape = (*shape[:-1], shape[-1] * leaf.rows[1])
            plan[tensor] = (dtype, shape)
    return plan


def _lay_out(
    folder: Path, plan: dict[str, tuple[np.dtype, tuple[int, ...]]], max_bytes: int
) -> dict[str, np.ndarray]:
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


def _places(leaf: Leaf, maps: dict[str, np.ndarray]):
    """Index into the stack, and where that matrix or vector is written."""
    rows = slice(None) if leaf.rows is None else slice(leaf.rows[0], None, leaf.rows[1])
    for i, module in enumerate(leaf.modules):
        target = maps[f"{module}.{leaf.parameter}"]
        if not leaf.fused:
            yield tuple(int(k) for k in np.unravel_index(i, leaf.lead)) if leaf.lead else (), target
            continue
        for e in range(leaf.lead[1]):
            yield (i, e), target[e].T[rows]


def _params(adapter: Adapter) -> dict[str, tuple]:
    """Method and host parameters of every adapted weight, by its name in the base."""
    found = {}

    def walk(here: dict, path: tuple[str, ...], prefix: str) -> None:
        for name, below in here.items():
            if isinstance(next(iter(below.values())), dict):
                walk(below, (*path, name), prefix)
            else:
                method = adapter.method_at(*path, name)
                found[".".join((prefix, *path, name))] = method, jax.device_get(below)

    for i, stack in enumerate(adapter.params["layers"]):
        walk(stack, (), f"layers.{i}")
    return found


def _named(tree, is_leaf=None) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_weight(node) -> bool:
    return isinstance(node, QTensor)


def _stored_dtype(weight) -> np.dtype:
    """Of a weight that is held in floats."""
    if not _is_weight(weight):
        return np.dtype(weight.dtype)
    return np.dtype(jnp.dtype(weight.format))
