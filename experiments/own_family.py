"""A family of models of one's own, to be copied: what its `config.json` says, what its layers have.

    python experiments/ppo_math.py --config.base.path=/path/to/a_tower \\
        --config.base.own="('experiments/own_family.py:tower',)"

A made-up one, `"model_type": "tower"`. Its `config.json` calls some fields, and its files some
modules, by other names, and it may or may not norm queries and keys. Everything else is the
package's: the same forward pass, formats, adapters, and a log-prob gap of 0. What parts there are
to choose from is told by `orbit_jax/model/config.py`, the names in a base by `model/weights.py`.
A part that is not there is a change of `model/transformer.py`, as every family runs through it.
"""

from typing import Any

from orbit_jax.model.family import Family, experts
from orbit_jax.model.fields import count


def facts(hf: dict) -> dict[str, Any]:
    """The fields of `ModelConfig` that not all families have in common."""
    return experts(hf) | {
        "expert_size": count(hf, "expert_width"),
        "norm_topk_prob": True,
        "qk_norm": "head" if hf.get("norm_queries_and_keys") else "",
    }


tower = Family(
    "tower",
    facts,
    fields={
        "width": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "key_heads": "num_key_value_heads",
    },
    spelling={
        "self_attn": "attention",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "out",
        "mlp": "moe",
        "gate": "router",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    },
)
