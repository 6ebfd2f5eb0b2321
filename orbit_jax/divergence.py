"""How far a model in low bits is from the one it was made of: KL per token, and whose fault it is.

KL(original || low-bit) of the next token, in nats, over a small set of passages. Both models go
through the project's own forward pass, and logits exist for a chunk of tokens at a time.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from orbit_jax import compile as compiler
from orbit_jax.checkpoint.huggingface import Contents
from orbit_jax.checkpoint.layout import Leaf
from orbit_jax.checkpoint.leaf_tensors import pieces, tensor_name
from orbit_jax.checkpoint.quantized_plan import Plan
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import logits
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.matmul import over_rows
from orbit_jax.quant.qtensor import dequantize, from_float
from orbit_jax.rl.packing import pack

_STREAM_TOKENS = 2048  # that go through the model at once


@dataclasses.dataclass(frozen=True)
class Passage:
    """Token ids; next tokens count from the position `begin` on."""

    ids: Sequence[int]
    begin: int = 0


class Divergence:
    """The original on a set of passages; `of` compares another model with it.

    Args:
      model: of the original.
      base: its weights, which are kept.
      passages: what both models read.
    """

    def __init__(self, model: ModelConfig, base: dict, passages: Sequence[Passage]):
        self._model, self._base = model, base
        options = compiler.options("fast")
        self._hidden = compiler.jit(_hidden, options, static_argnames=("config",))
        self._kl = compiler.jit(_kl, options, static_argnames=("config",))
        self._streams = list(_streams(passages))
        self._own = [self._hidden(model, base, stream) for stream, _ in self._streams]

    @property
    def tokens(self) -> int:
        """How many next tokens count."""
        return sum(int(counts.sum()) for _, counts in self._streams)

    def of(self, model: ModelConfig, base: dict) -> tuple[float, float]:
        """KL of a model from the original, the mean over all tokens and the largest of one."""
        found = []
        for (stream, counts), own in zip(self._streams, self._own, strict=True):
            hidden = self._hidden(model, base, stream)
            kl = self._kl(model, self._base, own, base, hidden)
            found.append(np.asarray(kl)[counts])
        every = np.concatenate(found)
        return float(every.mean(dtype=np.float64)), float(every.max())


def one_group_at_a_time(base: dict, plan: Plan, low: Contents) -> Iterator[tuple[str, dict]]:
    """The original with the weights of one group alone in low bits, group after group.

    Args:
      base: the original, plain.
      plan: that `low` was made by.
      low: the quantised folder.

    Yields:
      The group and a base of the original's structure: low-bit weights are widened to its floats,
      which gives the numbers that they have in low bits.
    """
    parts: dict[str, list[tuple[tuple, int, Leaf]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(plan.contents.layout):
        each = len(leaf.modules) // leaf.lead[0] if leaf.lead else 0
        for layer in range(leaf.lead[0] if leaf.lead else 0):
            modules = leaf.modules[layer * each : (layer + 1) * each]
            name = plan.contents.refs[tensor_name(leaf, modules[0], "weight")].name
            if leaf.kind == "Linear" and name in plan.weights:
                part = dataclasses.replace(leaf, modules=modules, lead=(1, *leaf.lead[1:]))
                parts.setdefault(plan.weights[name].group, []).append((path, layer, part))
    widen = compiler.jit(dequantize, compiler.options("fast"), static_argnames=("dtype",))
    for group, members in parts.items():
        changed = {}
        for path, layer, part in members:
            stack = changed.get(path, _at(base, path))
            found = [piece for _, piece, _ in pieces(part, plan.scheme, low.refs)]
            wide = jnp.stack([widen(piece, dtype=jnp.dtype(stack.format)) for piece in found])
            bits = from_float(wide.reshape(*part.lead[1:], *part.shape)).codes
            changed[path] = stack.replace(codes=stack.codes.at[layer].set(bits))
        yield (
            group,
            jax.tree_util.tree_map_with_path(
                lambda path, weight, changed=changed: changed.get(path, weight),
                base,
                is_leaf=lambda node: hasattr(node, "codes"),
            ),
        )


def _at(tree: dict, path: tuple):
    for key in path:
        tree = tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
    return tree


def _streams(passages: Sequence[Passage]) -> Iterator[tuple[Stream, np.ndarray]]:
    """Streams of one shape, with the places whose next token counts."""
    slots = max(len(s.ids) for s in passages)
    size = max(_STREAM_TOKENS, slots)
    size = min(size, sum(len(s.ids) for s in passages))
    size, slots = -(-size // 16) * 16, -(-slots // 16) * 16
    parts: list[list[Passage]] = [[]]
    for passage in passages:
        if sum(len(s.ids) for s in parts[-1]) + len(passage.ids) > size:
            parts.append([])
        parts[-1].append(passage)
    rows = max(map(len, parts))
    for part in parts:
        packed = pack([(i, 0, s.ids) for i, s in enumerate(part)], rows, 1, size)
        begins = np.full(rows + 1, math.inf)
        begins[: len(part)] = [s.begin for s in part]
        counts = packed.positions >= begins[packed.rows]
        yield Stream(packed.tokens, packed.rows, packed.positions, rows, slots), counts


def _hidden(config: ModelConfig, base: dict, stream: Stream) -> jax.Array:
    return apply(config, base, None, stream)[0]


def _kl(
    config: ModelConfig, base: dict, hidden: jax.Array, other: dict, others: jax.Array
) -> jax.Array:
    """KL at each token, `[N]`; every model has its own head."""

    def chunk(hidden: jax.Array, others: jax.Array) -> jax.Array:
        p = jax.nn.log_softmax(logits(config, base, hidden))
        q = jax.nn.log_softmax(logits(config, other, others))
        return (jnp.exp(p) * (p - q)).sum(axis=-1)

    return over_rows(chunk, min(config.head_chunk, hidden.shape[0]), hidden, others)
