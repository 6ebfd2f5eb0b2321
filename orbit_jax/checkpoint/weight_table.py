"""The weights of a base by kind: how they are stored, how many there are, what they take.

All of it follows from headers. The same weight of several layers is one row where it has one format
and one shape.
"""

import math
from dataclasses import dataclass, replace

import jax

from orbit_jax.checkpoint import gguf
from orbit_jax.checkpoint.config_words import ranges
from orbit_jax.checkpoint.gguf_file import GGUFFile
from orbit_jax.checkpoint.huggingface import Contents
from orbit_jax.checkpoint.layout import Leaf, layout
from orbit_jax.checkpoint.leaf_tensors import expected_tensors
from orbit_jax.checkpoint.safetensors_io import TensorRef
from orbit_jax.checkpoint.scheme import PLAIN, Scheme
from orbit_jax.model.config import ModelConfig

_LEVELS = 1024  # bytes of the table that stands for a global scale of NVFP4, for each matrix


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one name, format and shape.

    Attributes:
      name: module path in a layer, or of the top; layers: which layers, `` for the top.
      kind: as `Leaf.kind`.
      format: in words.
      shape: of one weight; count: how many there are.
      parameters: of all; active_parameters: those that compute one token. An expert counts by its
        share of visits, the head in full, an embedding not at all (it is only looked up) unless it
        is the head as well.
      file_bytes: of its tensors in the files; packed_bytes: in the base.
      bytes_per_weight: of the base.
    """

    name: str
    layers: str
    kind: str
    format: str
    shape: tuple[int, ...]
    count: int
    parameters: int
    active_parameters: int
    file_bytes: int
    packed_bytes: int
    bytes_per_weight: float


@dataclass(frozen=True)
class _Stored:
    """One weight of a leaf: its format in words, its bytes in the files and in the base."""

    format: str
    file_bytes: int
    packed_bytes: int


def of_folder(contents: Contents) -> tuple[WeightGroup, ...]:
    """The rows of a Hugging Face folder."""
    leaves = jax.tree_util.tree_leaves_with_path(contents.layout)
    return _grouped(
        contents.config, [(path, leaf, _in_folder(contents, leaf)) for path, leaf in leaves]
    )


def of_gguf(config: ModelConfig, file: GGUFFile) -> tuple[WeightGroup, ...]:
    """The rows of a GGUF file; its blocks take as much in the base."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(layout(config)):
        tensor = file.tensors[gguf.tensor_name(leaf.modules[0])]
        rows.append((path, leaf, _Stored(tensor.type.name, tensor.nbytes, tensor.nbytes)))
    return _grouped(config, rows)


def _in_folder(contents: Contents, leaf: Leaf) -> _Stored:
    """By the tensors of the first module: a stack holds all alike."""
    scheme = contents.scheme[leaf]
    names = expected_tensors(leaf, leaf.modules[0], scheme)
    refs = [contents.refs[name] for name in names if name in contents.refs]
    # A tensor of all experts, and of several weights' rows, belongs to each of them in part.
    share = (leaf.lead[1] if leaf.fused else 1) * (leaf.rows[1] if leaf.rows else 1)
    return _Stored(
        format=refs[0].dtype.name if scheme == PLAIN else scheme.words(),
        file_bytes=sum(ref.nbytes for ref in refs) // share,
        packed_bytes=sum(_packed_bytes(leaf, scheme, ref) for ref in refs) // share,
    )


def _packed_bytes(leaf: Leaf, scheme: Scheme, ref: TensorRef) -> int:
    """Of a tensor, what `formats.unpack` keeps or makes of it."""
    suffix = ref.name.rpartition(".")[2]
    dropped = {
        "weight_shape": True,
        "qzeros": scheme.format == "gptq" and scheme.symmetric,
        "g_idx": scheme.ordered,
    }
    if dropped.get(suffix, False):
        return 0
    if scheme.format == "nvfp4" and suffix == scheme.scale:
        return _LEVELS
    if scheme.format == "pack-quantized":  # words end in bits of no code
        out, width = leaf.shape
        if suffix == "weight_packed":
            return out * (width * scheme.bits // 8)
        if suffix == "weight_zero_point":
            return math.ceil(out * scheme.bits / 8) * ref.shape[1]
    return ref.nbytes


def _grouped(
    config: ModelConfig, rows: list[tuple[tuple, Leaf, _Stored]]
) -> tuple[WeightGroup, ...]:
    starts = [0]
    for _, count in config.stacks:
        starts.append(starts[-1] + count)
    groups: dict[tuple, WeightGroup] = {}
    layers: dict[tuple, set[int]] = {}
    for path, leaf, stored in rows:
        stack = next((k.idx for k in path if isinstance(k, jax.tree_util.SequenceKey)), None)
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        name = ".".join(names if stack is None else names[1:])
        key = (name, leaf.kind, leaf.shape, stored)
        group = _group(config, name, leaf, stored)
        groups[key] = _sum(groups[key], group) if key in groups else group
        if stack is not None:
            layers.setdefault(key, set()).update(range(starts[stack], starts[stack + 1]))
    return tuple(
        replace(group, layers=ranges(layers.get(key, ()))) for key, group in groups.items()
    )


def _group(config: ModelConfig, name: str, leaf: Leaf, stored: _Stored) -> WeightGroup:
    count, size = math.prod(leaf.lead), math.prod(leaf.shape)
    active = count * size
    if len(leaf.lead) == 2:
        active = active // config.num_experts * config.top_k
    if leaf.kind == "Embedding" and not config.tie_word_embeddings:
        active = 0
    return WeightGroup(
        name=name,
        layers="",
        kind=leaf.kind,
        format=stored.format,
        shape=leaf.shape,
        count=count,
        parameters=count * size,
        active_parameters=active,
        file_bytes=count * stored.file_bytes,
        packed_bytes=count * stored.packed_bytes,
        bytes_per_weight=stored.packed_bytes / size,
    )


def _sum(a: WeightGroup, b: WeightGroup) -> WeightGroup:
    """Two rows that differ in their layers."""
    fields = ("count", "parameters", "active_parameters", "file_bytes", "packed_bytes")
    return replace(a, **{field: getattr(a, field) + getattr(b, field) for field in fields})
