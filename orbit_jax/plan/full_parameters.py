"""Closed-form figures of ordinary RL training of all parameters, on as few nodes as hold it.

Assumed is a good implementation: weights, gradients and optimiser state spread over all devices
(ZeRO-3), experts exchanged tokens for instead of weights, layers made again in the backward pass,
one copy of the weights for rollouts spread over the same devices. Nothing is overlapped, and no
device waits for another. So memory and bytes are those that it takes at least.
"""

import dataclasses
import math
from dataclasses import dataclass

from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import DEVICES_PER_NODE, Device
from orbit_jax.plan.workload import Times, Traffic, Workload, gathered, scattered

_ACTIVATION_BYTES = 2  # bf16
# Products of a weight and a token: forward, and the gradients of input and weight; sampling once.
OPERATIONS_PER_PARAMETER = 6 + 2
_GATHERS = 2  # of the weights, per micro-batch: forward, and backward with the layer made again
_EXCHANGES = 3 + 1  # forward, forward again, backward; sampling
_WAYS = 2  # tokens go to their experts and come back


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter in training, and of the copy that rollouts use (0: training's own)."""

    name: str
    weights: float
    gradients: float
    master: float
    moments: float
    rollouts: float

    @property
    def bytes_per_parameter(self) -> float:
        """Of all that training keeps."""
        return self.weights + self.gradients + self.master + self.moments


PRECISIONS = (
    Precision("bf16, f32 master and Adam", 2, 2, 4, 8, rollouts=2),
    Precision("bf16, f32 master and 8-bit Adam", 2, 2, 4, 2, rollouts=2),
    Precision("fp8 weights and gradients alone", 1, 1, 0, 0, rollouts=0),
)


@dataclass(frozen=True)
class FullParameters:
    """One row of a comparison. Bytes are of all devices together unless a name says otherwise."""

    model: str
    device: str
    precision: Precision
    nodes: int
    state_bytes: float
    rollout_bytes: float
    cache_bytes: float
    activation_bytes_per_device: float
    bytes_per_device: float
    times: Times

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * DEVICES_PER_NODE

    def to_json(self) -> dict:
        """Plain keys and numbers, with the step's seconds and communication's share of them."""
        return dataclasses.asdict(self) | {
            "devices": self.devices,
            "bytes_per_parameter": self.precision.bytes_per_parameter,
            "step_seconds": self.times.step,
            "communication_share": self.times.share(),
        }


def full_parameters(
    model: Model, device: Device, workload: Workload, precision: Precision
) -> FullParameters:
    """The figures on the fewest nodes of eight devices that hold training and rollouts.

    Raises:
      ValueError: if a micro-batch alone does not fit a device.
    """
    spread = _spread_bytes(model, workload, precision)
    activations = _activation_bytes(model, workload)
    room = workload.bytes_per_device(device) - activations
    if room <= 0:
        raise ValueError(
            f"micro_batch_tokens={workload.micro_batch_tokens} takes {activations / 1e9:.0f} GB of "
            f"{device.name}: lower it"
        )
    nodes = math.ceil(sum(spread.values()) / (DEVICES_PER_NODE * room))
    devices = nodes * DEVICES_PER_NODE
    compute = workload.seconds(device, devices, OPERATIONS_PER_PARAMETER * model.active_parameters)
    return FullParameters(
        model=model.name,
        device=device.name,
        precision=precision,
        nodes=nodes,
        **spread,
        activation_bytes_per_device=activations,
        bytes_per_device=sum(spread.values()) / devices + activations,
        times=Times.of(device, compute, _sent(model, workload, precision, devices)),
    )


def largest_batch(
    model: Model,
    device: Device,
    workload: Workload,
    precision: Precision,
    nodes: int,
    *,
    critic_and_reference: bool = False,
) -> int:
    """Rows of the workload's length that `nodes` can sample at once; 0 without room for any.

    A critic of the same model is trained too, and a reference is a further copy of the weights.
    """
    spread = _spread_bytes(model, workload, precision)
    room = workload.bytes_per_device(device) - _activation_bytes(model, workload)
    left = nodes * DEVICES_PER_NODE * room - spread["state_bytes"] - spread["rollout_bytes"]
    if critic_and_reference:
        left -= spread["state_bytes"] + precision.weights * model.parameters
    return max(0, math.floor(left / (workload.tokens_per_row * model.cache_bytes_per_token)))


def _spread_bytes(model: Model, workload: Workload, precision: Precision) -> dict[str, float]:
    """What lies spread over all devices, in bytes of all together."""
    row = workload.tokens_per_row * model.cache_bytes_per_token
    return {
        "state_bytes": precision.bytes_per_parameter * model.parameters,
        "rollout_bytes": precision.rollouts * model.parameters,
        "cache_bytes": workload.rows_at_once * row,
    }


def _activation_bytes(model: Model, workload: Workload) -> float:
    """Of one device: the inputs of all layers, and one layer's gathered dense weights in bf16."""
    inputs = model.layers * workload.micro_batch_tokens * model.hidden
    return _ACTIVATION_BYTES * (inputs + model.dense_parameters / model.layers)


def _sent(
    model: Model, workload: Workload, precision: Precision, devices: int
) -> dict[str, Traffic]:
    """By purpose, of a device in a step."""
    tokens = workload.tokens / devices
    micro_batches = math.ceil(tokens / workload.micro_batch_tokens)
    once = _one_gather(model, devices) * micro_batches
    holders = min(model.experts, devices)
    exchanged = tokens * model.sparse_layers * model.top_k * model.hidden * _ACTIVATION_BYTES
    routing = Traffic()
    if model.experts:
        routing = scattered(exchanged * _WAYS * _EXCHANGES, holders)
    return {
        "weights": once * (_GATHERS * precision.weights),
        "gradients": once * precision.gradients,
        "routing": routing,
        "synchronisation": scattered(precision.rollouts * model.parameters / devices, devices),
    }


def _one_gather(model: Model, devices: int) -> Traffic:
    """Of all weights that a device computes with, at one byte a parameter.

    Experts stay where they are, up to one device for each; beyond that several devices, on
    different nodes, share an expert's weights and gather them over the network.
    """
    gather = gathered(model.parameters - model.expert_parameters, devices)
    if model.experts and devices > model.experts:
        sharing = devices / model.experts
        own = model.expert_parameters / model.experts
        gather += Traffic(network_bytes=own * (sharing - 1) / sharing)
    return gather
