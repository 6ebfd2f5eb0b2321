"""Loading a Hugging Face folder as a frozen base, bit for bit and without widening.

Headers are read and every tensor is accounted for before the first byte of a weight is touched.
Then each leaf of the base is filled weight by weight from maps of the files, where it will stay:
the host holds no more than a few tensors besides.
"""

import hashlib
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from orbit_jax.checkpoint.common import few, file_digest
from orbit_jax.checkpoint.language_tensors import (
    is_left_unread,
    language_prefix,
    language_tensors,
    module_names,
)
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.leaf_tensors import expected_tensors, pieces, tensor_name
from orbit_jax.checkpoint.placing import DEFAULT_PLACEMENT, Placement, fill
from orbit_jax.checkpoint.quantization import Quantization, read_quantization
from orbit_jax.checkpoint.safetensors_io import (
    TensorRef,
    checkpoint_files,
    open_checkpoint,
    read_json,
    read_small,
)
from orbit_jax.checkpoint.scheme import Scheme
from orbit_jax.checkpoint.stacks import split
from orbit_jax.model.config import ModelConfig

SchemeOf = Callable[[Leaf, str], Scheme]


@dataclass(frozen=True)
class Contents:
    """What a folder holds, by its headers.

    Attributes:
      config: of the language model; stacks begin where the format of weights changes.
      layout: the base as a tree of `Leaf`.
      scheme: how the weights of a leaf are stored.
      refs: every tensor that is read, by its name in a model of language alone.
      unread: tensors that are left out on purpose, by their names in the files: other parts of the
        model, layers that guess further tokens, scales of activations and of the cache.
    """

    config: ModelConfig
    layout: dict
    scheme: dict[Leaf, Scheme]
    refs: dict[str, TensorRef]
    unread: dict[str, TensorRef]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(ref.nbytes for ref in self.refs.values())


def load_base(
    folder: str | Path,
    placement: Placement = DEFAULT_PLACEMENT,
) -> tuple[ModelConfig, dict]:
    """Loads `config.json` and the safetensors of a folder.

    Args:
      folder: a Hugging Face checkpoint, plain or in one of `formats.FORMATS`. Where activations are
        meant to be quantised too, only weights are.
      placement: where arrays lie and whom to tell how far loading is.

    Returns:
      The config and the base: `embed_tokens`, `layers` (one stack per run of equal layers, every
      leaf `[layers, ...]`), `norm`, and `lm_head` unless it is tied.

    Raises:
      ValueError: if a file is missing or broken, if the quantisation is not supported, if a tensor
        is missing, unknown or of another shape or type than `config.json` implies, or if the
        experts of one layer differ in format.
    """
    contents = open_base(folder)
    done, total = 0, contents.nbytes

    def told(bytes_read: int) -> None:
        nonlocal done
        done += bytes_read
        if placement.progress is not None:
            placement.progress(done, total)

    def load(path: tuple, leaf: Leaf) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = (*leaf.lead, *leaf.shape)
        return fill(
            name, shape, pieces(leaf, contents.scheme[leaf], contents.refs), placement, told
        )

    return contents.config, jax.tree_util.tree_map_with_path(load, contents.layout)


def read_config(folder: str | Path) -> ModelConfig:
    """What `config.json` and the headers of the files say, before any weight is read."""
    return open_base(folder).config


def open_base(folder: str | Path) -> Contents:
    """Reads the headers of a folder and accounts for every tensor.

    Raises:
      ValueError: as `load_base`.
    """
    folder = Path(folder)
    files = open_checkpoint(folder)
    hf = read_json(folder / "config.json")
    config = ModelConfig.from_hf(hf)
    refs = language_tensors(files)
    _drop_tied_head(refs, config)
    scheme_of = _scheme_of(read_quantization(folder, hf), files, refs)
    unread = _check_tensors(folder, config, hf, refs, scheme_of)

    def stored(leaf: Leaf, module: str) -> Hashable:
        scheme = scheme_of(leaf, module)
        names = expected_tensors(leaf, module, scheme)
        types = (refs[n].dtype for n in names if n in refs and not n.endswith("_shape"))
        return scheme, tuple(types)

    config = split(config, stored, _words)
    tree = layout(config)
    return Contents(
        config=config,
        layout=tree,
        scheme={leaf: scheme_of(leaf, leaf.modules[0]) for leaf in jax.tree.leaves(tree)},
        refs={name: ref for name, ref in refs.items() if name not in unread},
        unread={refs[name].name: refs[name] for name in sorted(unread)},
    )


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


def _words(stored: tuple[Scheme, tuple[np.dtype, ...]]) -> str:
    scheme, types = stored
    return f"{scheme.words()} of {', '.join(dtype.name for dtype in types)}"


def _scheme_of(
    quantization: Quantization, files: dict[str, TensorRef], refs: dict[str, TensorRef]
) -> SchemeOf:
    """Finds the scheme of each module, once."""
    known: dict[tuple[str, str], Scheme] = {}
    prefix = language_prefix(files)

    def scheme_of(leaf: Leaf, module: str) -> Scheme:
        key = (module, leaf.parameter)
        if key not in known:
            find = lambda suffix: refs.get(tensor_name(leaf, module, suffix))  # noqa: E731
            known[key] = quantization.scheme(module_names(module, prefix), leaf.kind, find)
        return known[key]

    return scheme_of


def _drop_tied_head(refs: dict[str, TensorRef], config: ModelConfig) -> None:
    """Forgets a head that repeats the embedding, as older files have it."""
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
    folder: Path, config: ModelConfig, hf: dict, refs: dict[str, TensorRef], scheme_of: SchemeOf
) -> set[str]:
    """Every expected tensor is there with its shape and type; gives those that may stay unread."""
    known, missing, wrong = set(), set(), []
    repeated: dict[str, tuple[int, ...]] = {}  # shapes, by the tensors that say them again
    for leaf in jax.tree.leaves(layout(config)):
        for module in dict.fromkeys(leaf.modules):
            scheme = scheme_of(leaf, module)
            _check_embedding(leaf, module, scheme)
            for name, stored in expected_tensors(leaf, module, scheme).items():
                known.add(name)
                if name not in refs:
                    if not stored.optional:
                        missing.add(name)
                    continue
                ref = refs[name]
                if ref.shape not in stored.shapes:
                    allowed = " or ".join(str(list(shape)) for shape in stored.shapes)
                    wrong.append(f"{name} has shape {list(ref.shape)}, not {allowed}")
                elif ref.dtype not in stored.dtypes:
                    types = " or ".join(dtype.name for dtype in stored.dtypes)
                    wrong.append(f"{name} has type {ref.dtype.name}, not {types}")
                elif name.endswith("weight_shape"):
                    repeated[name] = leaf.shape
    said = read_small(refs[name] for name in repeated)
    for name, shape in repeated.items():
        says = said[refs[name].name].tolist()
        if says != list(shape):
            wrong.append(f"{name} says {says}, not {list(shape)}")
    text = hf["text_config"] if isinstance(hf.get("text_config"), dict) else hf
    rest = sorted(refs.keys() - known)
    unread = {name for name in rest if is_left_unread(name, config.num_layers, text)}
    faults = {
        "missing": sorted(missing),
        "unknown": [name for name in rest if name not in unread],
        "wrong": wrong,
    }
    found = "; ".join(f"{what}: {few(names)}" for what, names in faults.items() if names)
    if found:
        raise ValueError(
            f"{folder}: the tensors are not those of config.json ({found}): use the config.json "
            "that belongs to these weights"
        )
    return unread


def _check_embedding(leaf: Leaf, module: str, scheme: Scheme) -> None:
    if leaf.kind == "Embedding" and not scheme.symmetric:
        raise ValueError(
            f"config.json: {module} is quantised with zero points, which a look-up does not "
            "support: quantise it symmetrically or keep it plain"
        )
