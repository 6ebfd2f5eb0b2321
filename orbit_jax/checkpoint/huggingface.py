"""Loading a Hugging Face folder as a frozen base, bit for bit and without widening.

Headers are read and every tensor is accounted for before the first byte of a weight is touched.
Then each leaf of the base is allocated once, filled module by module from maps of the files, and
handed to the device: the host never holds more than one leaf and one tensor besides.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from orbit_jax.checkpoint.common import Put, allocate, few, file_digest, to_default_device
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.pack_quantized import (
    Quantization,
    Scheme,
    codes_from_words,
    group_of,
    offset_from_words,
    read_quantization,
    stored_tensors,
)
from orbit_jax.checkpoint.safetensors_io import (
    TensorRef,
    checkpoint_files,
    open_checkpoint,
    read_json,
)
from orbit_jax.model.config import ModelConfig
from orbit_jax.quant.qtensor import QTensor, from_float

_BITS = {2: np.uint16, 4: np.uint32}


def load_base(folder: str | Path, put: Put | None = None) -> tuple[ModelConfig, dict]:
    """Loads `config.json` and the safetensors of a folder.

    Args:
      folder: a Hugging Face checkpoint, plain or compressed-tensors `pack-quantized`.
      put: places one host array on the devices, given its path in the base (as
        `layers.0.self_attn.q_proj.codes`); without one, the default device takes it.

    Returns:
      The config and the base: `embed_tokens`, `layers` (one stack per run of equal layers, every
      leaf `[layers, ...]`), `norm`, and `lm_head` unless it is tied.

    Raises:
      ValueError: if a file is missing or broken, if the quantisation is not supported, if a tensor
        is missing, unknown or of another shape or type than `config.json` implies, or if the
        layers of one stack differ in format.
    """
    folder = Path(folder)
    refs = open_checkpoint(folder)
    hf = read_json(folder / "config.json")
    config = ModelConfig.from_hf(hf)
    quantization = read_quantization(hf)
    tree = layout(config)
    leaves = jax.tree.leaves(tree)
    schemes = {leaf: _scheme_of(leaf, quantization) for leaf in leaves}
    _drop_derived(refs, config)
    _check_tensors(folder, refs, schemes)
    for leaf, scheme in schemes.items():
        _check_uniform(leaf, scheme, refs)

    def load(path: tuple, leaf: Leaf) -> QTensor | jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _load(name, leaf, schemes[leaf], refs, put or to_default_device)

    return config, jax.tree_util.tree_map_with_path(load, tree)


def read_config(folder: str | Path) -> ModelConfig:
    """What `config.json` says, before any weight is read."""
    return ModelConfig.from_hf(read_json(Path(folder) / "config.json"))


def base_hash(folder: str | Path) -> str:
    """sha256 over `config.json` and the safetensors files of a folder: ties an adapter to its base.

    Files are hashed side by side, and their names and digests are hashed in order.

    Raises:
      ValueError: if the folder or a file of it is missing.
    """
    files = [Path(folder) / "config.json", *checkpoint_files(folder)]
    read_json(files[0])
    with ThreadPoolExecutor() as pool:
        digests = pool.map(file_digest, files)
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _scheme_of(leaf: Leaf, quantization: Quantization) -> Scheme | None:
    """The scheme that all modules of a leaf share."""
    found = {module: quantization.scheme(module, leaf.kind) for module in leaf.modules}
    scheme = found[leaf.modules[0]]
    for module, other in found.items():
        if other != scheme:
            raise ValueError(
                f"config.json: {module} ({_words(other)}) and {leaf.modules[0]} ({_words(scheme)}) "
                "differ in quantisation: layers and experts that run as one stack must share it"
            )
    if scheme is not None:
        group_of(leaf, scheme)
        if leaf.kind == "Embedding" and not scheme.symmetric:
            raise ValueError(
                f"config.json: {leaf.modules[0]} is quantised with zero points, which a look-up "
                "does not support: quantise it symmetrically or keep it plain"
            )
    return scheme


def _words(scheme: Scheme | None) -> str:
    if scheme is None:
        return "plain"
    group = "one group a row" if scheme.group_size is None else f"groups of {scheme.group_size}"
    return f"{scheme.bits} bits, {group}, {'' if scheme.symmetric else 'a'}symmetric"


def _drop_derived(refs: dict[str, TensorRef], config: ModelConfig) -> None:
    """Forgets tensors that repeat what the config or another tensor says, as older files do."""
    for name in [name for name in refs if name.endswith("rotary_emb.inv_freq")]:
        del refs[name]
    head, embedding = refs.get("lm_head.weight"), refs.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head and embedding:
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        if not same or not _equal_bytes(head, embedding):
            raise ValueError(
                "config.json: tie_word_embeddings=true but lm_head.weight differs from "
                "model.embed_tokens.weight: set it to false to use that head"
            )
        del refs["lm_head.weight"]


def _equal_bytes(a: TensorRef, b: TensorRef) -> bool:
    return np.array_equal(a.map().view(np.uint8), b.map().view(np.uint8))


def _check_tensors(
    folder: Path, refs: dict[str, TensorRef], schemes: dict[Leaf, Scheme | None]
) -> None:
    """Every expected tensor is there with its shape and type, and there is no other."""
    expected, wrong = set(), []
    for leaf, scheme in schemes.items():
        stored = stored_tensors(leaf, scheme)
        for module in leaf.modules:
            for suffix, (dtypes, shape) in stored.items():
                name = f"{module}.{suffix}"
                expected.add(name)
                if name not in refs:
                    continue
                ref = refs[name]
                if ref.shape != shape:
                    wrong.append(f"{name} has shape {list(ref.shape)}, not {list(shape)}")
                elif ref.dtype not in dtypes:
                    types = " or ".join(dtype.name for dtype in dtypes)
                    wrong.append(f"{name} has type {ref.dtype.name}, not {types}")
                elif suffix == "weight_shape" and tuple(ref.map().tolist()) != leaf.shape:
                    wrong.append(f"{name} says {ref.map().tolist()}, not {list(leaf.shape)}")
    faults = {
        "missing": sorted(expected - refs.keys()),
        "unknown": sorted(refs.keys() - expected),
        "wrong": wrong,
    }
    found = "; ".join(f"{what}: {few(names)}" for what, names in faults.items() if names)
    if found:
        raise ValueError(
            f"{folder}: the tensors are not those of config.json ({found}): use the config.json "
            "that belongs to these weights"
        )


def _check_uniform(leaf: Leaf, scheme: Scheme | None, refs: dict[str, TensorRef]) -> None:
    """All modules of a leaf hold floats of one type: a stack has one dtype."""
    suffix = "weight" if scheme is None else "weight_scale"
    first = refs[f"{leaf.modules[0]}.{suffix}"]
    for module in leaf.modules:
        ref = refs[f"{module}.{suffix}"]
        if ref.dtype != first.dtype:
            raise ValueError(
                f"{ref.name} is {ref.dtype.name} but {first.name} is {first.dtype.name}: layers "
                "and experts that run as one stack must share a type, convert one of them"
            )


def _load(
    name: str, leaf: Leaf, scheme: Scheme | None, refs: dict[str, TensorRef], put: Put
) -> QTensor | jax.Array:
    def read(suffix: str, decode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        for i, module in enumerate(leaf.modules):
            part = decode(refs[f"{module}.{suffix}"].map())
            if i == 0:
                stack = allocate((len(leaf.modules), *part.shape), part.dtype)
            stack[i] = part
        return stack.reshape(*leaf.lead, *part.shape)

    if scheme is None:
        weight = read("weight", lambda weight: weight)
        if leaf.kind == "Vector":
            return put(name, weight)
        q = from_float(weight)
        return q.replace(codes=put(f"{name}.codes", q.codes))
    out, width = leaf.shape
    scale = refs[f"{leaf.modules[0]}.weight_scale"].dtype
    codes = read("weight_packed", lambda words: codes_from_words(words, width, scheme.bits))
    codes = put(f"{name}.codes", codes)
    scales = read("weight_scale", lambda scales: scales.view(_BITS[scale.itemsize]))
    scales = put(f"{name}.scales", scales)
    offset = None
    if not scheme.symmetric:
        offset = read("weight_zero_point", lambda words: offset_from_words(words, out, scheme.bits))
        offset = put(f"{name}.offset", offset)
    return QTensor(
        codes=codes,
        scales=scales,
        offset=offset,
        format=f"int{scheme.bits}",
        scale_dtype=scale.name,
        group_size=group_of(leaf, scheme),
    )
