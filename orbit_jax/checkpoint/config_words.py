"""What a model is, in words for people."""

from collections.abc import Iterable

from orbit_jax.checkpoint.common import few
from orbit_jax.model.config import ModelConfig


def describe(config: ModelConfig) -> dict[str, str]:
    """A line for each part of the architecture, by what it is about."""
    tied = "shared with the head" if config.tie_word_embeddings else "apart from the head"
    dense = f", dense feed-forward {config.intermediate_size:,}"
    lines = {
        "family": config.family,
        "layers": _layers(config),
        "width": f"{config.hidden_size:,}{dense if not all(config.sparse) else ''}",
        "attention": "; ".join([_heads(config), *_attention_extras(config)]),
    }
    if any(config.sparse):
        lines["experts"] = _experts(config)
    return lines | {
        "rope": _rope(config),
        "context": f"{config.max_positions:,} positions",
        "vocabulary": f"{config.vocab_size:,} rows, embedding {tied}",
    }


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as `0-3, 7`, cut short where there are many runs."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return few(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def _layers(config: ModelConfig) -> str:
    kinds = (("dense", False), ("sparse", True))
    found = {name: [i for i, kind in enumerate(config.sparse) if kind == k] for name, k in kinds}
    parts = [f"{len(of)} {name} ({ranges(of)})" for name, of in found.items() if of]
    return f"{config.num_layers}: {', '.join(parts)}"


def _heads(config: ModelConfig) -> str:
    if latent := config.latent:
        queries = f"{latent.q_rank:,} for queries, " if latent.q_rank else ""
        return (
            f"multi-head latent: {config.num_heads} heads of {latent.nope} + {latent.rope} "
            f"rotated, values of {latent.value}; latents of {queries}{latent.kv_rank:,} for keys "
            "and values"
        )
    kind = {config.num_heads: "multi-head", 1: "multi-query"}
    name = kind.get(config.num_kv_heads, "grouped-query")
    return (
        f"{name}: {config.num_heads} heads of {config.head_dim}, "
        f"{config.num_kv_heads} of keys and values"
    )


def _attention_extras(config: ModelConfig) -> list[str]:
    extras = {
        "biases": config.attention_bias,
        "queries and keys normed, each head": config.qk_norm == "head",
        "queries and keys normed, all heads together": config.qk_norm == "all",
        f"clipped at {config.clip_qkv:g}": config.clip_qkv,
        "sinks": config.sinks,
    }
    found = [words for words, yes in extras.items() if yes]
    limited = [i for i, window in enumerate(config.windows) if window]
    if limited:
        where = "all layers" if len(limited) == config.num_layers else f"layers {ranges(limited)}"
        found.append(f"window of {max(config.windows):,} in {where}")
    return found


def _experts(config: ModelConfig) -> str:
    router = {
        "softmax": "softmax over all",
        "chosen": "softmax over the chosen",
        "sigmoid": "sigmoid with a correction that only chooses",
    }
    parts = [
        f"{config.num_experts} of width {config.expert_size:,}, {config.top_k} visited by a token",
        f"shared of width {config.shared_size:,}" if config.shared_size else "none shared",
        f"router: {router[config.router]}",
    ]
    if config.num_groups > 1:
        parts.append(f"out of {config.top_groups} of {config.num_groups} groups")
    if config.norm_topk_prob:
        parts.append("weights normalised")
    if config.routed_scale != 1:
        parts.append(f"times {config.routed_scale:g}")
    if config.expert_bias:
        parts.append("biases")
    if config.swiglu_limit:
        parts.append(f"swiglu clamped at {config.swiglu_limit:g}")
    return "; ".join(parts)


def _rope(config: ModelConfig) -> str:
    rope = config.rope
    parts = [f"base {rope.theta:,.0f}", f"{config.rotated} dimensions of a head"]
    if rope.kind != "default":
        start = f" from {rope.original:,} positions" if rope.original else ""
        parts.insert(1, f"{rope.kind}, stretched {rope.factor:g} times{start}")
    if rope.interleaved:
        parts.append("neighbours are pairs")
    return ", ".join(parts)
