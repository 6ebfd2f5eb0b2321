"""Closed-form figures of training adapters on one node, for models that no compiler has to see.

The layout is that of `mesh.py`. Experts, the cache's rows and all that is trained lie over all
devices; the rest of the base over `tensor` (norms, vectors and the narrow `kv_a_proj_with_mqa` do
not, and are not told apart here: they are small); the residual stream by tokens over both axes.
Sampler and trainer share it, so that weights never move. A compiled program's own figures are
better where there is one.

As in `full_parameters.py`, a step is sampling, one forward and one backward pass of the policy,
with layers made again; what a critic or a reference adds to time and traffic is left out.
"""

import dataclasses
import math
from dataclasses import dataclass

from orbit_jax.adapters.footprint import STATE_BYTES
from orbit_jax.model.config import MeshShape
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import Device
from orbit_jax.plan.estimate import GRADIENT_BYTES
from orbit_jax.plan.workload import Times, Traffic, Workload

BYTES_PER_TRAINED = STATE_BYTES + GRADIENT_BYTES
_F32, _BF16 = 4, 2
# Products of a weight and a token: forward and the gradient of the input; sampling once. Frozen
# weights need no gradient of their own.
OPERATIONS_PER_PARAMETER = 4 + 2
_PASSES = 3 + 1  # forward, forward again, backward; sampling
NODE = MeshShape(data=2, tensor=4)


@dataclass(frozen=True)
class AdapterOnly:
    """One row of a comparison. Bytes are of one device unless a name says otherwise."""

    model: str
    device: str
    devices: int
    trained_parameters: int
    reduced_parameters: int
    base_bytes: int
    base_bytes_per_device: float
    adapter_bytes_per_device: float
    cache_bytes_per_device: float
    activation_bytes_per_device: float
    bytes_per_device: float
    fits: bool
    times: Times

    def to_json(self) -> dict:
        """Plain keys and numbers, with the step's seconds and communication's share of them."""
        return dataclasses.asdict(self) | {
            "step_seconds": self.times.step,
            "communication_share": self.times.share(),
            "communication_share_without_routing": self.times.share("dense", "adapter"),
            "communication_share_of_adapters": self.times.share("adapter"),
        }


def lora_parameters(model: Model, rank: int) -> tuple[int, int]:
    """Of LoRA of that rank on all linear weights: all, and those of them on dense weights."""
    return rank * (model.dense_widths + model.expert_widths), rank * model.dense_widths


def adapter_only(
    model: Model,
    device: Device,
    workload: Workload,
    trained: int,
    reduced: int,
    mesh: MeshShape = NODE,
) -> AdapterOnly:
    """The figures of training `trained` parameters beside a frozen base.

    Args:
      reduced: of them those on dense weights: parts are gathered for each pass, and their gradients
        summed over devices. An expert's adapter lives on one device and needs neither.
    """
    held = {
        "base_bytes_per_device": _base_bytes(model, mesh),
        "adapter_bytes_per_device": _adapter_bytes(trained, mesh),
        "cache_bytes_per_device": workload.rows_at_once * _row_bytes(model, workload, mesh),
        "activation_bytes_per_device": _activation_bytes(model, workload, mesh),
    }
    compute = workload.seconds(
        device, mesh.size, OPERATIONS_PER_PARAMETER * model.active_parameters
    )
    total = sum(held.values())
    return AdapterOnly(
        model=model.name,
        device=device.name,
        devices=mesh.size,
        trained_parameters=trained,
        reduced_parameters=reduced,
        base_bytes=model.base_bytes,
        **held,
        bytes_per_device=total,
        fits=total <= workload.bytes_per_device(device),
        times=Times.of(device, compute, _sent(model, workload, reduced, mesh)),
    )


def largest_batch(
    model: Model, device: Device, workload: Workload, trained: int, mesh: MeshShape = NODE
) -> int:
    """Rows of the workload's length that can be sampled at once; 0 without room for any."""
    left = _left(model, device, workload, mesh) - _adapter_bytes(trained, mesh)
    return max(0, math.floor(left / _row_bytes(model, workload, mesh)))


def largest_rank(model: Model, device: Device, workload: Workload, mesh: MeshShape = NODE) -> int:
    """Of LoRA on all linear weights, beside the workload's rows; 0 without room for any."""
    left = _left(model, device, workload, mesh)
    left -= workload.rows_at_once * _row_bytes(model, workload, mesh)
    of_one, _ = lora_parameters(model, 1)
    return max(0, math.floor(left / _adapter_bytes(of_one, mesh)))


def _left(model: Model, device: Device, workload: Workload, mesh: MeshShape) -> float:
    """Memory of a device beside base and activations."""
    held = _base_bytes(model, mesh) + _activation_bytes(model, workload, mesh)
    return workload.bytes_per_device(device) - held


def _base_bytes(model: Model, mesh: MeshShape) -> float:
    """Of one device. Beside experts all is bf16, and experts take the rest of the bytes."""
    if not model.experts:
        return model.base_bytes / mesh.tensor
    rest = _BF16 * (model.parameters - model.expert_parameters)
    return rest / mesh.tensor + (model.base_bytes - rest) / mesh.size


def _adapter_bytes(trained: int, mesh: MeshShape) -> float:
    """Of one device: its part of masters, moments and gradients."""
    return BYTES_PER_TRAINED * trained / mesh.size


def _row_bytes(model: Model, workload: Workload, mesh: MeshShape) -> float:
    """Of one device, for one cached row more on the node."""
    return workload.tokens_per_row * model.cache_bytes_per_token / mesh.size


def _activation_bytes(model: Model, workload: Workload, mesh: MeshShape) -> float:
    """Of one device: the inputs of all layers in f32, and what is largest in one layer.

    That is its part of the dense weights, widened, and the slots of all choices of all tokens.
    """
    tokens = workload.micro_batch_tokens  # of one data shard
    inputs = model.layers * tokens * model.hidden * _F32 / mesh.tensor
    widened = _BF16 * model.dense_parameters / model.layers / mesh.tensor
    slots = tokens * mesh.data * model.top_k * model.hidden * _BF16 if model.experts else 0
    return inputs + widened + slots


def _sent(model: Model, workload: Workload, reduced: int, mesh: MeshShape) -> dict[str, Traffic]:
    """By purpose, of a device in a step; all of it within the node.

    A device that takes part in a gather or a reduce-scatter over n devices sends (n - 1) / n of the
    whole. Counted are:

    - routing: forward and in sampling a bf16 slot for each choice of all tokens, reduce-scattered
      over all devices, which sends more than an all-to-all would; backward one cotangent per token,
      gathered from all devices. Over `data` tokens are gathered in all three, and the gradient of
      the experts' input is scattered. What is made again sends nothing.
    - dense: over `tensor`, in each pass, what projections read, gathered in bf16, and the columns
      that a device has of their outputs.
    - adapter: in each micro-batch, parts of dense adapters gathered in f32 for the forward pass and
      once more for the backward pass, and their gradients reduce-scattered.
    """
    tokens = workload.tokens / mesh.data  # of one data shard
    micro_batches = math.ceil(tokens / workload.micro_batch_tokens)
    over_data, over_tensor, over_all = ((n - 1) / n for n in (mesh.data, mesh.tensor, mesh.size))
    once = workload.tokens * model.sparse_layers * model.hidden * _BF16
    routing = once * (over_all * (2 * model.top_k + 1) + over_data * (3 + 1))
    width = model.gathered_widths + model.dense_outputs / mesh.tensor
    dense = tokens * width * _BF16 * over_tensor
    return {
        "routing": Traffic(routing),
        "dense": Traffic(dense * _PASSES),
        "adapter": Traffic(3 * micro_batches * reduced * _F32 * over_all),
    }
