"""What a model is: the facts of its architecture, read from a Hugging Face `config.json`."""

import bisect
import itertools
from dataclasses import dataclass

_FAMILIES = ("qwen3_moe", "qwen3", "llama")


@dataclass(frozen=True)
class MeshShape:
    """Devices along the axes: rows over `data`, dense outputs over `tensor`, experts over both."""

    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.tensor


@dataclass(frozen=True)
class ModelConfig:
    """Architecture facts and the numerics of a run. Hashable: it is a static argument of every jit.

    Attributes:
      sparse: for each layer, whether its feed-forward part is a mixture of experts.
      splits: layers that begin a stack of their own since their weights are stored in another
        format than those of the layer before.
      recipe: how equal log-probs are reached: `fast` (row-stable kernels) or `tiles` (fixed tiles).
      compute_dtype: `bfloat16`; `float32` is for checks against other implementations.
      tile_rows: rows of a tile under `tiles`.
      query_chunk: queries of one row that attention takes together.
      head_chunk: rows for which logits exist at the same time.
      expert_block: rows that one expert takes together, per call.
      remat: make a layer's activations again in the backward pass instead of keeping them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    qk_norm: bool
    sparse: tuple[bool, ...]
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = False
    splits: tuple[int, ...] = ()
    recipe: str = "fast"
    compute_dtype: str = "bfloat16"
    tile_rows: int = 32
    query_chunk: int = 128
    head_chunk: int = 1024
    expert_block: int = 256
    remat: bool = False
    mesh: MeshShape = MeshShape()

    @property
    def stacks(self) -> tuple[tuple[bool, int], ...]:
        """Runs of layers that are computed and stored alike: `(sparse, number of layers)`."""
        alike = ((kind, bisect.bisect(self.splits, i)) for i, kind in enumerate(self.sparse))
        return tuple((kind, len(list(run))) for (kind, _), run in itertools.groupby(alike))

    @property
    def tile(self) -> int:
        """Rows per tile for row-wise work; 0 when rows go through together."""
        return self.tile_rows if self.recipe == "tiles" else 0

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """Reads a Hugging Face `config.json`.

        Raises:
          ValueError: for a family or a feature that is not supported, a missing field, or two
            spellings of one field that contradict each other.
        """
        family = hf.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(
                f"config.json: model_type={family!r} is not supported: use one of {_FAMILIES}"
            )
        for field, plain in _UNSUPPORTED.items():
            if hf.get(field) not in plain:
                raise ValueError(
                    f"config.json: {field}={hf[field]!r} is not supported for {family}: "
                    f"only {plain[-1]!r}"
                )
        layers = _count(hf, "num_hidden_layers")
        heads = _count(hf, "num_attention_heads")
        hidden = _count(hf, "hidden_size")
        experts = _count(hf, "num_experts", "num_local_experts") if family == "qwen3_moe" else 0
        step = _count(hf, "decoder_sparse_step", default=1)
        dense = hf.get("mlp_only_layers") or ()
        config = cls(
            family=family,
            vocab_size=_count(hf, "vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_count(hf, "num_key_value_heads", default=heads),
            head_dim=_count(hf, "head_dim", default=hidden // heads),
            intermediate_size=_count(hf, "intermediate_size"),
            rms_norm_eps=_positive("rms_norm_eps", _read(hf, "rms_norm_eps")),
            rope_theta=_rope_theta(hf),
            max_positions=_count(hf, "max_position_embeddings"),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=family in ("qwen3_moe", "qwen3"),
            sparse=tuple(
                bool(experts) and i not in dense and (i + 1) % step == 0 for i in range(layers)
            ),
            num_experts=experts,
            top_k=_count(hf, "num_experts_per_tok") if experts else 0,
            expert_size=_count(hf, "moe_intermediate_size") if experts else 0,
            norm_topk_prob=bool(hf.get("norm_topk_prob", False)),
        )
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={config.num_kv_heads}"
            )
        if experts and config.top_k > experts:
            raise ValueError(
                f"config.json: num_experts_per_tok={config.top_k} exceeds num_experts={experts}"
            )
        return config


# Fields whose other values change the computation, with the values that are understood.
_UNSUPPORTED = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "hidden_act": (None, "silu"),
}


def _read(hf: dict, *names: str, default: float | None = None):
    values = [hf[name] for name in names if hf.get(name) is not None] or [default]
    if values[0] is None:
        raise ValueError(f"config.json: the field {names[0]} is missing")
    if any(value != values[0] for value in values):
        raise ValueError(f"config.json: {' and '.join(names)} contradict each other: {values}")
    return values[0]


def _count(hf: dict, *names: str, default: int | None = None) -> int:
    value = _read(hf, *names, default=default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {names[0]}={value!r} must be a whole number of at least 1")
    return value


def _rope_theta(hf: dict) -> float:
    """`rope_theta` stands at the top (older files) or in `rope_parameters` (transformers 5)."""
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: rope_parameters={nested!r} must be an object")
    if nested.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json: rope_type={nested['rope_type']!r} is not supported: only 'default'"
        )
    thetas = {v for v in (hf.get("rope_theta"), nested.get("rope_theta")) if v is not None}
    if len(thetas) != 1:
        raise ValueError(f"config.json: rope_theta is missing or contradictory: {sorted(thetas)}")
    return _positive("rope_theta", thetas.pop())


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"config.json: {name}={value!r} must be a number above 0")
    return float(value)
