"""What each family of models is, read from a Hugging Face `config.json`.

A family is a few facts: which fields of the file it reads, which parts its layers have, and how its
files name them. The same model code runs them all. Files of different ages spell a field
differently; all spellings are read, and two that contradict each other are refused.
"""

from typing import Any

from orbit_jax.model.family import Family, Latent, experts, windows
from orbit_jax.model.fields import count, number, positive, read
from orbit_jax.model.rope import read_rope, rope_fields, yarn_magnitude


def facts(hf: dict) -> dict[str, Any]:
    """The architecture fields of a `ModelConfig` for a Hugging Face `config.json`.

    Raises:
      ValueError: for a family or a feature that is not supported, a missing field, or two
        spellings of one field that contradict each other.
    """
    family = hf.get("model_type")
    if family in _WRAPPERS:
        if not isinstance(hf.get("text_config"), dict):
            raise ValueError(f"config.json: text_config is missing, {family} keeps its facts there")
        hf = hf["text_config"]
        family = hf.get("model_type") or "deepseek_v3"
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={family!r} is not supported: use one of "
            f"{(*FAMILIES, *_WRAPPERS)}, or describe your own in base.own"
        )
    described = FAMILIES[family]
    hf = {described.fields.get(name, name): value for name, value in hf.items()}
    for field, plain in _UNSUPPORTED.items():
        if hf.get(field) not in plain:
            raise ValueError(
                f"config.json: {field}={hf[field]!r} is not supported for {family}: "
                f"only {plain[-1]!r}"
            )
    heads, hidden = count(hf, "num_attention_heads"), count(hf, "hidden_size")
    common = {
        "family": family,
        "vocab_size": count(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": count(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": count(hf, "num_key_value_heads", default=heads),
        "head_dim": count(hf, "head_dim", default=hidden // heads),
        "intermediate_size": count(hf, "intermediate_size"),
        "rms_norm_eps": positive("rms_norm_eps", read(hf, "rms_norm_eps")),
        "rope": read_rope(hf),
        "max_positions": count(hf, "max_position_embeddings"),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "attention_bias": bool(hf.get("attention_bias", False)),
        "windows": windows(hf),
    }
    found = common | described.facts(hf)
    _check(found)
    return found


def add_family(family: Family) -> None:
    """Makes a family of one's own known, in place of an earlier one of its name.

    Raises:
      ValueError: for the name of one of this package.
    """
    if family.name in _OF_PACKAGE:
        raise ValueError(f"model_type {family.name!r} is a family of this package: take another")
    FAMILIES[family.name] = family


def _llama(hf: dict) -> dict:
    return {"sparse": (False,) * count(hf, "num_hidden_layers")}


def _qwen3(hf: dict) -> dict:
    return _llama(hf) | {"qk_norm": "head"}


def _qwen3_moe(hf: dict) -> dict:
    step, dense = count(hf, "decoder_sparse_step", default=1), hf.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list of layers")
    layers = range(count(hf, "num_hidden_layers"))
    return experts(hf) | {
        "qk_norm": "head",
        "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        "expert_size": count(hf, "moe_intermediate_size"),
        "norm_topk_prob": bool(hf.get("norm_topk_prob", False)),
    }


def _mixtral(hf: dict) -> dict:
    return experts(hf) | {
        "expert_size": count(hf, "intermediate_size"),
        "norm_topk_prob": True,
        "windows": windows(hf, common_window=True),
    }


def _olmoe(hf: dict) -> dict:
    clip = hf.get("clip_qkv")
    return experts(hf) | {
        "qk_norm": "all",
        "expert_size": count(hf, "intermediate_size"),
        "norm_topk_prob": bool(hf.get("norm_topk_prob", False)),
        "clip_qkv": positive("clip_qkv", clip) if clip is not None else 0.0,
    }


def _deepseek_v3(hf: dict) -> dict:
    for field, understood in _DEEPSEEK.items():
        if hf.get(field) not in (None, *understood):
            raise ValueError(
                f"config.json: {field}={hf[field]!r} is not supported for deepseek_v3: "
                f"only {understood[-1]!r}"
            )
    latent = Latent(
        q_rank=count(hf, "q_lora_rank") if hf.get("q_lora_rank") is not None else 0,
        kv_rank=count(hf, "kv_lora_rank"),
        nope=count(hf, "qk_nope_head_dim"),
        rope=count(hf, "qk_rope_head_dim"),
        value=count(hf, "v_head_dim"),
    )
    rope = read_rope(hf, interleaved=bool(hf.get("rope_interleave", True)))
    # The scale of scores grows with the stretch (yarn's mscale), once for queries, once for keys.
    stretch = rope_fields(hf)
    scale = (latent.nope + latent.rope) ** -0.5
    if rope.kind != "default":
        scale *= yarn_magnitude(rope.factor, number(stretch, "mscale_all_dim", 0.0)) ** 2
    layers = range(count(hf, "num_hidden_layers"))
    dense = read(hf, "first_k_dense_replace", default=0)
    shared = read(hf, "n_shared_experts", default=0)
    size = count(hf, "moe_intermediate_size")
    for name, value in (("first_k_dense_replace", dense), ("n_shared_experts", shared)):
        if type(value) is not int or value < 0:
            raise ValueError(f"config.json: {name}={value!r} must be a whole number of at least 0")
    return experts(hf) | {
        "latent": latent,
        # What attention sees: one head of keys, the latent with the rotated part behind it.
        "num_kv_heads": 1,
        "head_dim": latent.kv_rank + latent.rope,
        "attention_scale": scale,
        "rope": rope,
        "sparse": tuple(i >= dense for i in layers),
        "expert_size": size,
        "shared_size": shared * size,
        "router": "sigmoid",
        "norm_topk_prob": bool(hf.get("norm_topk_prob", True)),
        "num_groups": count(hf, "n_group", default=1),
        "top_groups": count(hf, "topk_group", default=1),
        "routed_scale": positive(
            "routed_scaling_factor", read(hf, "routed_scaling_factor", default=1.0)
        ),
    }


def _gpt_oss(hf: dict) -> dict:
    alternate = {}
    if hf.get("sliding_window") is not None and not hf.get("layer_types"):
        window, layers = count(hf, "sliding_window"), count(hf, "num_hidden_layers")
        alternate = {"windows": tuple(window if i % 2 == 0 else 0 for i in range(layers))}
    return (
        experts(hf)
        | alternate
        | {
            "attention_bias": bool(hf.get("attention_bias", True)),
            "sinks": True,
            "expert_size": count(hf, "intermediate_size"),
            "router": "chosen",
            "expert_bias": True,
            "swiglu_limit": positive("swiglu_limit", read(hf, "swiglu_limit", default=7.0)),
            "swiglu_alpha": positive("swiglu_alpha", read(hf, "swiglu_alpha", default=1.702)),
        }
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3_moe", _qwen3_moe),
        Family("qwen3", _qwen3),
        Family("llama", _llama),
        Family(
            "mixtral",
            _mixtral,
            spelling={
                "mlp": "block_sparse_moe",
                "gate_proj": "w1",
                "down_proj": "w2",
                "up_proj": "w3",
            },
        ),
        Family("olmoe", _olmoe),
        Family("deepseek_v3", _deepseek_v3),
        Family("kimi_k2", _deepseek_v3),
        Family(
            "gpt_oss",
            _gpt_oss,
            spelling={"gate": "router"},
            fused={
                "gate_proj": ("gate_up_proj", (0, 2)),
                "up_proj": ("gate_up_proj", (1, 2)),
                "down_proj": ("down_proj", None),
            },
        ),
    )
}
_OF_PACKAGE = frozenset(FAMILIES)
# Models with more than language in them: the facts stand under `text_config`.
_WRAPPERS = ("kimi_k25",)

# Fields whose other values change the computation, with the values that are understood.
_UNSUPPORTED = {
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1.0),
}
_DEEPSEEK = {
    "attention_bias": (False,),
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
}


def _check(found: dict) -> None:
    """Refuses counts that contradict each other."""
    heads, kv, experts = found["num_heads"], found["num_kv_heads"], found.get("num_experts", 0)
    if heads % kv:
        raise ValueError(
            f"config.json: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv}"
        )
    if experts and found["top_k"] > experts:
        raise ValueError(
            f"config.json: num_experts_per_tok={found['top_k']} exceeds num_experts={experts}"
        )
    groups, chosen = found.get("num_groups", 1), found.get("top_groups", 1)
    if experts % groups or chosen > groups or found.get("top_k", 0) > experts // groups * chosen:
        raise ValueError(
            f"config.json: n_group={groups}, topk_group={chosen} and num_experts_per_tok="
            f"{found['top_k']} do not fit {experts} experts"
        )
    rotated = found["latent"].rope if "latent" in found else found["head_dim"]
    if rotated % 2:
        raise ValueError(f"config.json: {rotated} rotated dimensions of a head must be even")
