"""Which Hugging Face modules make up each leaf of the base.

A leaf of the base is a stack over layers, and over experts; a checkpoint holds each of them apart.
This table is all that reading and writing share about names and shapes.
"""

import itertools
from dataclasses import dataclass

from orbit_jax.model.config import ModelConfig


@dataclass(frozen=True)
class Leaf:
    """One leaf of the base before its bytes are read.

    Attributes:
      modules: module names in stack order, `prod(lead)` of them (of the layers alone if `fused`).
      lead: leading dimensions of the stack: `()`, `(layers,)` or `(layers, experts)`.
      shape: shape of one weight, `(out, in)`, or of one vector, `(width,)`.
      kind: `Linear` and `Embedding` are what quantisation targets call them; a `Router` and a
        `Vector` (norms, biases, sinks) are never quantised.
      parameter: what the tensor is called in its module; all of a module's tensors have it as
        their prefix, as `weight` and `weight_scale`.
      fused: a module holds all experts of its layer, in tensors with a leading dimension E.
      rows: `(start, step)` where a tensor interleaves the rows of several weights; None for all.
    """

    modules: tuple[str, ...]
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    parameter: str = "weight"
    fused: bool = False
    rows: tuple[int, int] | None = None


def layout(config: ModelConfig) -> dict:
    """The base as a tree of `Leaf`, of the structure that `load_base` returns."""
    width, vocab = config.hidden_size, config.vocab_size
    tree = {
        "embed_tokens": Leaf(("model.embed_tokens",), (), (vocab, width), "Embedding"),
        "layers": [],
        "norm": Leaf(("model.norm",), (), (width,), "Vector"),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = Leaf(("lm_head",), (), (vocab, width), "Linear")
    first = 0
    for sparse, count in config.stacks:
        tree["layers"].append(_stack(config, sparse, range(first, first + count)))
        first += count
    return tree


def _stack(config: ModelConfig, sparse: bool, layers: range) -> dict:
    width = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def leaf(name: str, shape: tuple[int, ...], kind: str = "Linear") -> Leaf:
        names = tuple(f"model.layers.{l}.{name}" for l in layers)
        return Leaf(names, (len(layers),), shape, kind)

    def experts(name: str, shape: tuple[int, ...]) -> Leaf:
        pairs = itertools.product(layers, range(config.num_experts))
        names = tuple(f"model.layers.{l}.mlp.experts.{e}.{name}" for l, e in pairs)
        return Leaf(names, (len(layers), config.num_experts), shape, "Linear")

    attention = {
        "q_proj": leaf("self_attn.q_proj", (queries, width)),
        "k_proj": leaf("self_attn.k_proj", (keys, width)),
        "v_proj": leaf("self_attn.v_proj", (keys, width)),
        "o_proj": leaf("self_attn.o_proj", (width, queries)),
    }
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            attention[name] = leaf(f"self_attn.{name}", (config.head_dim,), "Vector")
    if sparse:
        inner = config.expert_size
        mlp = {
            "gate": leaf("mlp.gate", (config.num_experts, width), "Router"),
            "experts": {
                "gate_proj": experts("gate_proj", (inner, width)),
                "up_proj": experts("up_proj", (inner, width)),
                "down_proj": experts("down_proj", (width, inner)),
            },
        }
    else:
        inner = config.intermediate_size
        mlp = {
            "gate_proj": leaf("mlp.gate_proj", (inner, width)),
            "up_proj": leaf("mlp.up_proj", (inner, width)),
            "down_proj": leaf("mlp.down_proj", (width, inner)),
        }
    return {
        "input_layernorm": leaf("input_layernorm", (width,), "Vector"),
        "post_attention_layernorm": leaf("post_attention_layernorm", (width,), "Vector"),
        "self_attn": attention,
        "mlp": mlp,
    }
