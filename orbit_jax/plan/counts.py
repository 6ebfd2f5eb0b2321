"""A model by its counts, for figures that need no compiler: of a config, or of an assumed shape."""

import math
from dataclasses import dataclass

import jax

from orbit_jax.model.config import ModelConfig
from orbit_jax.model.weights import Weight, weights

# INT4 codes with a bf16 scale for every 32 of them.
LOW_BIT_BYTES = 0.5 + 2 / 32
# What `model/transformer.py` gathers over `tensor`, as a dimension of the weight that it belongs
# to: results of norms, inputs of some weights, outputs of others.
_GATHERED = {
    **{"input_layernorm": 0, "post_attention_layernorm": 0},
    **{"q_b_proj": 1, "o_proj": 1, "down_proj": 1},
    **{"k_proj": 0, "v_proj": 0},
}


@dataclass(frozen=True)
class Model:
    """Numbers of parameters unless a name says otherwise.

    Attributes:
      parameters: all.
      expert_parameters: of routed experts.
      other_parameters: embedding, head, routers, norms and biases.
      active_parameters: that a token is multiplied by.
      sparse_layers: of `layers`, those with experts.
      experts: of one layer, 0 for a dense model; a token visits `top_k` of them.
      dense_widths: in + out, summed over the linear weights that are no experts: LoRA has so many
        parameters per rank there; `expert_widths`: the same over all routed experts.
      dense_outputs: out, summed over the linear weights that are no experts.
      gathered_widths: numbers per token that devices with parts of the dense weights gather of each
        other: what each group of projections reads, and keys and values.
      cache_bytes_per_token: keys and values of all layers in bf16.
      base_bytes: of the low-bit checkpoint.
    """

    name: str
    parameters: int
    expert_parameters: int
    other_parameters: int
    active_parameters: int
    layers: int
    sparse_layers: int
    hidden: int
    experts: int
    top_k: int
    dense_widths: int
    expert_widths: int
    dense_outputs: int
    gathered_widths: int
    cache_bytes_per_token: int
    base_bytes: int

    @property
    def dense_parameters(self) -> int:
        """Of the linear weights of layers that are no experts."""
        return self.parameters - self.expert_parameters - self.other_parameters


def count(config: ModelConfig, name: str = "", base_bytes: int | None = None) -> Model:
    """The counts of a model.

    Args:
      name: for people; by default the family's.
      base_bytes: of the checkpoint where it is known. By default experts are taken for INT4 and
        the rest for bf16; in a dense model all linear weights of its layers for INT4.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        weights(config), is_leaf=lambda node: isinstance(node, Weight)
    )
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    nodes = [node for _, node in leaves]
    sizes = [math.prod(node.lead) * math.prod(node.shape) for node in nodes]
    linear = [n.kind == "Linear" and "lm_head" not in p for p, n in zip(paths, nodes, strict=True)]
    expert = [yes and "['experts']" in p for p, yes in zip(paths, linear, strict=True)]
    dense = [yes and not routed for yes, routed in zip(linear, expert, strict=True)]

    def over(chosen: list[bool], measure) -> int:
        pairs = zip(chosen, nodes, strict=True)
        return sum(math.prod(n.lead) * measure(n.shape) for yes, n in pairs if yes)

    routed, total = over(expert, math.prod), sum(sizes)
    idle = routed - routed * config.top_k // max(config.num_experts, 1)
    # A table of embeddings is looked up, unless it is the head too.
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    low_bit = routed or over(linear, math.prod)
    keys = config.num_kv_heads * config.head_dim * (1 if config.latent else 2)
    return Model(
        name=name or config.family,
        parameters=total,
        expert_parameters=routed,
        other_parameters=total - over(linear, math.prod),
        active_parameters=total - idle - looked_up,
        layers=config.num_layers,
        sparse_layers=sum(config.sparse),
        hidden=config.hidden_size,
        experts=config.num_experts,
        top_k=config.top_k,
        dense_widths=over(dense, sum),
        expert_widths=over(expert, sum),
        dense_outputs=over(dense, lambda shape: shape[0]),
        gathered_widths=sum(
            math.prod(node.lead) * node.shape[_GATHERED[path[-1].key]]
            for (path, _), node, routed in zip(leaves, nodes, expert, strict=True)
            if path[-1].key in _GATHERED and not routed
        ),
        cache_bytes_per_token=2 * keys * config.num_layers,
        base_bytes=base_bytes or round(LOW_BIT_BYTES * low_bit + 2 * (total - low_bit)),
    )


def preset(name: str) -> Model:
    """A model of one of the sizes `7b`, `70b`, `1t`, `1.6t` and `50t`, of an assumed shape.

    Raises:
      ValueError: for another name.
    """
    if name not in _SHAPES:
        raise ValueError(f"model={name} is no known size: use one of {', '.join(_SHAPES)}")
    return count(ModelConfig.from_hf(_COMMON | _SHAPES[name]), name)


def _dense(hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocab: int) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _experts(hidden: int, layers: int, heads: int, experts: int, size: int, top_k: int) -> dict:
    """Latent attention, one shared expert and a first dense layer, as in DeepSeek-V3."""
    return {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 18432,
        "first_k_dense_replace": 1,
        "num_attention_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163_840,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": size,
        "num_experts_per_tok": top_k,
    }


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 131_072}
_SHAPES = {
    "7b": _dense(4096, 32, 11_008, 32, 32, 32_000),  # Llama 2
    "70b": _dense(8192, 80, 28_672, 64, 8, 128_256),  # Llama 3
    "1t": _experts(7168, 61, 64, 384, 2048, 8),  # Kimi-K2
    # DeepSeek-V4-Pro's experts; its attention is another, here that of DeepSeek-V3.
    "1.6t": _experts(7168, 61, 128, 384, 3072, 6),
    "50t": _experts(16_384, 96, 128, 1536, 6912, 8),  # no such model is known
}
