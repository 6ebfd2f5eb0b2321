"""A closed form of what a run takes of each device: no compiler, a second for the largest model.

Parts that are arguments follow from counts. Temporaries are the arrays that are alive together at
the widest place of each program; compilers need more or less, and their figures are better.
"""

import math
from dataclasses import dataclass

from orbit_jax.adapters.footprint import STATE_BYTES
from orbit_jax.config import Config
from orbit_jax.model.config import ModelConfig
from orbit_jax.rl.batch import token_buckets

_BF16, _F32 = 2, 4
# Bytes of a trained parameter: what is kept of it, and while it is trained its gradients of a
# micro-batch, their sum, and the parameter that they lead to.
GRADIENT_BYTES = 3 * _F32


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device. `sample` and `ppo_step` are the temporaries of the two programs."""

    base: int
    adapters: int
    cache: int
    sample: int
    ppo_step: int

    @property
    def temporaries(self) -> int:
        """Of the larger program."""
        return max(self.sample, self.ppo_step)

    @property
    def total(self) -> int:
        """What the run needs at its widest."""
        return self.base + self.adapters + self.cache + self.temporaries


def estimate(config: Config, model: ModelConfig, base_bytes: int, trained: int) -> Estimate:
    """For a run of `config` with a model on its mesh.

    Args:
      base_bytes: of the base on one device.
      trained: parameters of policy and critic together.
    """
    shape = model.mesh
    positions = config.decoded_rows * config.num_slots / shape.size
    # A latent is key and value at once.
    width = (1 if model.latent else 2) * model.num_kv_heads * model.head_dim
    prompts = config.decoded_rows / config.sampler.group_size * config.sampler.max_prompt_tokens
    tokens = token_buckets(config)[-1].tokens
    layers = model.num_layers if not model.remat else 0
    kept = tokens / shape.size * model.num_layers * model.hidden_size * _F32
    kept += layers * tokens / shape.data * _kept_width(model) * _BF16 / shape.tensor
    gradients = GRADIENT_BYTES * trained / shape.size
    return Estimate(
        base=base_bytes,
        adapters=math.ceil(STATE_BYTES * trained / shape.size),
        cache=math.ceil(positions * width * model.num_layers * _BF16),
        sample=math.ceil(_layer(model, prompts)),
        ppo_step=math.ceil(kept + _layer(model, tokens) + _head(model) + gradients),
    )


def _kept_width(model: ModelConfig) -> int:
    """Numbers per token that one layer's backward pass reads: inputs and outputs of its matmuls."""
    width = 6 * model.hidden_size + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    experts = model.top_k * model.expert_size if any(model.sparse) else 0
    return width + 4 * max(experts, 0 if all(model.sparse) else model.intermediate_size)


def _layer(model: ModelConfig, tokens: float) -> float:
    """What one layer has at one time, of `tokens` over all data shards."""
    here = tokens / model.mesh.data
    gathered = here * model.hidden_size * _BF16
    inner = 0 if all(model.sparse) else model.intermediate_size
    dense = 2 * here * max(inner, model.shared_size, model.num_heads * model.head_dim) * _BF16
    if not any(model.sparse):
        return 2 * gathered + dense
    # A slot for each choice of all tokens, on every device: its experts may be the chosen ones.
    return 2 * gathered + max(dense, tokens * model.top_k * model.hidden_size * _BF16)


def _head(model: ModelConfig) -> float:
    """Logits of a chunk of tokens, with what their gradient needs, in f32."""
    return 4 * _F32 * model.head_chunk * model.vocab_size / model.mesh.tensor
