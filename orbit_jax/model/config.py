"""What a model is: the facts of its architecture, and the numerics of a run."""

import bisect
import itertools
from dataclasses import dataclass

from orbit_jax.model.families import facts
from orbit_jax.model.family import Latent
from orbit_jax.model.rope import Rope


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
      head_dim: width of a key as attention sees it; with `latent`, of the latent and the rotated
        part together, of which there is one for all heads.
      rope: rotary position embedding.
      qk_norm: RMSNorm on queries and keys: `head` for each head, `all` over all heads together.
      attention_bias: whether the projections of attention have biases.
      windows: positions that each layer looks back over, 0 for all; `()` for all in each layer.
      sinks: whether each head has a learned logit that takes part in the softmax and adds nothing.
      latent: multi-head latent attention, or None.
      attention_scale: what scores are multiplied by; 0 for `head_dim ** -0.5`.
      clip_qkv: bound of queries, keys and values; 0 for none.
      router: weights of the chosen experts: `softmax` over all experts, `chosen` (softmax over the
        chosen alone, with a bias in the logits) or `sigmoid` (chosen with a correction that does
        not weigh).
      num_groups, top_groups: experts are chosen out of the best groups of them.
      routed_scale: what the weights of the chosen experts are multiplied by.
      shared_size: width of the expert that every token visits, 0 for none.
      expert_bias: whether experts have biases.
      swiglu_limit, swiglu_alpha: clamps of a gated activation, 0 for plain swiglu.
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
    rope: Rope
    max_positions: int
    tie_word_embeddings: bool
    sparse: tuple[bool, ...]
    qk_norm: str = ""
    attention_bias: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    latent: Latent | None = None
    attention_scale: float = 0.0
    clip_qkv: float = 0.0
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = False
    router: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0
    shared_size: int = 0
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
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

    @property
    def own_heads(self) -> bool:
        """Whether each tensor rank makes the queries of its own heads, not those of all."""
        shape = self.mesh
        return shape.tensor > 1 and self.num_heads % shape.tensor == 0 and self.qk_norm != "all"

    @property
    def score_scale(self) -> float:
        """What attention's dot products are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotated(self) -> int:
        """Dimensions of a head that rotary embedding turns."""
        return self.latent.rope if self.latent else self.head_dim

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """Reads a Hugging Face `config.json`.

        Raises:
          ValueError: for a family or a feature that is not supported, a missing field, or two
            spellings of one field that contradict each other.
        """
        return cls(**facts(hf))
