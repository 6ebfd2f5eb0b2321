"""What a model is, read from the metadata of a GGUF file.

Every key of the architecture is accounted for: one that is not understood may change the
computation, so it is refused by name.
"""

from orbit_jax.checkpoint.common import few
from orbit_jax.checkpoint.gguf_file import GGUFFile
from orbit_jax.model.config import ModelConfig

_ARCHITECTURES = ("llama",)

# Keys with a count each, and the field of a Hugging Face config.json that says the same.
_COUNTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Keys that repeat or refine these; they are read below.
_OTHERS = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
)
# Keys whose other values change the computation, with the values that do not.
_NEUTRAL = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The config of a model.

    Raises:
      ValueError: for an architecture, a key or a value that is not supported, or a missing key.
    """
    family = file.get("general.architecture", str)
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={family!r} is not supported: use one of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    _check_keys(file, family)
    hf = {field: file.get(f"{family}.{key}", int) for key, field in _COUNTS.items()}
    heads = hf["num_attention_heads"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path}: the tensor token_embd.weight is missing: download it again")
    hf |= {
        "model_type": family,
        "vocab_size": file.get(f"{family}.vocab_size", int, embedding.shape[0]),
        "num_key_value_heads": file.get(f"{family}.attention.head_count_kv", int, heads),
        "head_dim": _head_dim(file, family, hf["hidden_size"], heads),
        "rms_norm_eps": file.get(f"{family}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": file.get(f"{family}.rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    words = len(file.get("tokenizer.ggml.tokens", list, []))
    if words > hf["vocab_size"]:
        raise ValueError(
            f"{file.path}: its tokenizer has {words} tokens, the model {hf['vocab_size']}: convert "
            "the model again"
        )
    try:
        return ModelConfig.from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{file.path}: the metadata, put as a config.json, say: {error}") from None


def _check_keys(file: GGUFFile, family: str) -> None:
    unknown = []
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{family}.")
        if name == key or name in _COUNTS or name in _OTHERS:
            continue
        if name not in _NEUTRAL:
            unknown.append(f"{key}={str(value)[:40]}")
        elif value not in _NEUTRAL[name]:
            raise ValueError(
                f"{file.path}: {key}={value!r} is not supported for {family}: only "
                f"{_NEUTRAL[name][-1]!r}"
            )
    if unknown:
        raise ValueError(
            f"{file.path}: the metadata {few(unknown)} may change the computation and are not "
            "understood: use a model without them"
        )


def _head_dim(file: GGUFFile, family: str, hidden: int, heads: int) -> int:
    """Width of a head; keys, values and the rotated part must all have it."""
    width = file.get(f"{family}.attention.key_length", int, max(hidden // max(heads, 1), 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        other = file.get(f"{family}.{key}", int, width)
        if other != width:
            raise ValueError(
                f"{file.path}: {family}.{key}={other} differs from the head width {width}, which "
                "is not supported: use a model whose heads are rotated whole"
            )
    return width
