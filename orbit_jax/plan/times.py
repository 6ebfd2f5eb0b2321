"""How long the parts of a step take at a device's stated rates: a roofline, not a measurement.

Each part takes as long as its slowest resource: matrix products, memory, links. Weights are widened
in memory before they are multiplied, as the programs do it: a packed byte is read, two bf16 bytes a
weight are written and read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orbit_jax.config import Config
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import Device
from orbit_jax.rl.batch import token_buckets

_WIDENED = 2 * 2  # bytes of a bf16 weight, written and read
_FORWARD, _STEP = 2, 6  # operations of a parameter and a token; with the layer made again, and back


@dataclass(frozen=True)
class Rates:
    """What of its stated rates a device reaches: assumptions, to be changed."""

    flops: float = 0.4
    memory: float = 0.8
    links: float = 0.8


@dataclass(frozen=True)
class Times:
    """Seconds of one PPO step and of loading.

    Attributes:
      prefill, decode, training: computing and memory, the slower of the two.
      sample_links, step_links: what links take, by purpose; they are not overlapped.
      load: reading the checkpoint.
    """

    prefill: float
    decode: float
    training: float
    sample_links: Mapping[str, float]
    step_links: Mapping[str, float]
    load: float

    @property
    def step(self) -> float:
        """Of a step with its rollouts."""
        links = sum(self.sample_links.values()) + sum(self.step_links.values())
        return self.prefill + self.decode + self.training + links

    def to_json(self) -> dict[str, float]:
        """Seconds by part."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "training": self.training,
            "links_sampling": sum(self.sample_links.values()),
            "links_step": sum(self.step_links.values()),
            "step": self.step,
            "load_checkpoint": self.load,
        }

    def share(self, purpose: str) -> float:
        """Of the step that the links take for one purpose."""
        return (self.sample_links[purpose] + self.step_links[purpose]) / self.step


def predict(
    config: Config,
    model: Model,
    device: Device,
    base_bytes: int,
    sent: Mapping[str, Mapping[str, int]],
    disk_bytes_per_second: float,
    rates: Rates = Rates(),
) -> Times:
    """The times of a step of `config`, all rollouts as long as they may be.

    Args:
      base_bytes: on one device.
      sent: bytes that one device sends by purpose, in `sample` (for all its tokens) and `ppo_step`.
    """
    devices = config.mesh.size
    flops = devices * device.bf16_flops * rates.flops
    memory = device.memory_bytes_per_second * rates.memory
    links = device.link_bytes_per_second * rates.links
    rows, sampler = config.decoded_rows, config.sampler
    waves = config.rows / rows
    prompts = rows / sampler.group_size * sampler.max_prompt_tokens

    def products(operations: int, tokens: float) -> float:
        return operations * model.active_parameters * tokens / flops

    def pass_over(share_of_experts: float) -> float:
        """Reading and widening the base once."""
        routed = model.expert_parameters / model.parameters
        touched = 1 - routed * (1 - share_of_experts)
        widened = _WIDENED * model.parameters * touched / devices
        return (base_bytes * touched + widened) / memory

    chosen = 1 - (1 - model.top_k / model.experts) ** rows if model.experts else 1.0
    length = sampler.max_prompt_tokens + sampler.max_completion_tokens / 2
    cached = rows * length * model.cache_bytes_per_token / devices / memory
    a_token = max(products(_FORWARD, rows), pass_over(chosen) + cached)

    tokens = token_buckets(config)[-1].tokens
    passes = [_STEP] * (1 + config.ppo.critic)  # with gradients
    passes += [_FORWARD] * (config.ppo.critic + (config.ppo.kl != "off"))
    passes += [_FORWARD] * (config.ppo.epochs * config.ppo.minibatches > 1)
    # A pass of 6 operations goes over the weights three times.
    training = sum(max(products(p, tokens), p / _FORWARD * pass_over(1.0)) for p in passes)
    return Times(
        prefill=waves * max(products(_FORWARD, prompts), pass_over(1.0)),
        decode=waves * sampler.max_completion_tokens * a_token,
        training=training * config.ppo.micro_batches * config.ppo.epochs,
        sample_links={name: waves * size / links for name, size in sent["sample"].items()},
        step_links={name: size / links for name, size in sent["ppo_step"].items()},
        load=devices * base_bytes / disk_bytes_per_second,
    )
