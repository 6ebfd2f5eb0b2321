"""Which weights a model has: the tree that the base, its loader and its initialiser share.

Names are those of Hugging Face modules in their most common spelling; a weight's bias or a bare
parameter of a module stands beside it, as `q_proj_bias`. Linear weights are `[out, in]`; those of a
layer are stacked over the layers of a stack, those of an expert over experts too.
"""

from dataclasses import dataclass

from orbit_jax.model.config import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One leaf: stacked over `lead` (layers, experts), each of `shape`.

    `kind` is `Linear`, `Embedding`, `Router`, or `Vector` for norms, biases and sinks.
    """

    lead: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str = "Linear"


def weights(config: ModelConfig) -> dict:
    """The base as a tree of `Weight`."""
    width, vocab = config.hidden_size, config.vocab_size
    tree = {
        "embed_tokens": Weight((), (vocab, width), "Embedding"),
        "layers": [_stack(config, sparse, count) for sparse, count in config.stacks],
        "norm": Weight((), (width,), "Vector"),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = Weight((), (vocab, width))
    return tree


def _stack(config: ModelConfig, sparse: bool, layers: int) -> dict:
    norm = Weight((layers,), (config.hidden_size,), "Vector")
    return {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn": _latent(config, layers) if config.latent else _grouped(config, layers),
        "mlp": _sparse(config, layers) if sparse else _dense(config, layers),
    }


def _grouped(config: ModelConfig, layers: int) -> dict:
    """Grouped-query attention."""
    width, heads = config.hidden_size, config.num_heads
    queries, keys = heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, queries),
    }
    tree = {name: Weight((layers,), shape) for name, shape in shapes.items()}
    if config.attention_bias:
        for name, (out, _) in shapes.items():
            tree[f"{name}_bias"] = Weight((layers,), (out,), "Vector")
    if config.qk_norm:
        whole = config.qk_norm == "all"
        tree["q_norm"] = Weight((layers,), (queries if whole else config.head_dim,), "Vector")
        tree["k_norm"] = Weight((layers,), (keys if whole else config.head_dim,), "Vector")
    if config.sinks:
        tree["sinks"] = Weight((layers,), (heads,), "Vector")
    return tree


def _latent(config: ModelConfig, layers: int) -> dict:
    """Multi-head latent attention."""
    width, heads, latent = config.hidden_size, config.num_heads, config.latent
    queries = heads * (latent.nope + latent.rope)
    tree = {
        "kv_a_proj_with_mqa": Weight((layers,), (latent.kv_rank + latent.rope, width)),
        "kv_a_layernorm": Weight((layers,), (latent.kv_rank,), "Vector"),
        "kv_b_proj": Weight((layers,), (heads * (latent.nope + latent.value), latent.kv_rank)),
        "o_proj": Weight((layers,), (width, heads * latent.value)),
    }
    if not latent.q_rank:
        return tree | {"q_proj": Weight((layers,), (queries, width))}
    return tree | {
        "q_a_proj": Weight((layers,), (latent.q_rank, width)),
        "q_a_layernorm": Weight((layers,), (latent.q_rank,), "Vector"),
        "q_b_proj": Weight((layers,), (queries, latent.q_rank)),
    }


def _dense(config: ModelConfig, layers: int) -> dict:
    return _gated(config.hidden_size, config.intermediate_size, (layers,))


def _sparse(config: ModelConfig, layers: int) -> dict:
    experts, width = config.num_experts, config.hidden_size
    lead = (layers, experts)
    tree = {
        "gate": Weight((layers,), (experts, width), "Router"),
        "experts": _gated(width, config.expert_size, lead),
    }
    if config.router == "chosen":
        tree["gate_bias"] = Weight((layers,), (experts,), "Vector")
    if config.router == "sigmoid":
        tree["e_score_correction_bias"] = Weight((layers,), (experts,), "Vector")
    if config.expert_bias:
        for name, weight in list(tree["experts"].items()):
            tree["experts"][f"{name}_bias"] = Weight(lead, weight.shape[:1], "Vector")
    if config.shared_size:
        tree["shared_experts"] = _gated(width, config.shared_size, (layers,))
    return tree


def _gated(width: int, inner: int, lead: tuple[int, ...]) -> dict:
    return {
        "gate_proj": Weight(lead, (inner, width)),
        "up_proj": Weight(lead, (inner, width)),
        "down_proj": Weight(lead, (width, inner)),
    }
