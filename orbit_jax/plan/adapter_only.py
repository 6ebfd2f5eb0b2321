"""Closed-form figures of training adapters on one node, for models that no compiler has to see.

The layout is this project's: experts spread over all devices, dense weights over `tensor`, rows
over `data`, embedding, head and norms on every device; sampler and trainer share it, so that
weights never move. A compiled program's own figures are better where there is one.
"""

import dataclasses
import math
from dataclasses import dataclass

from orbit_jax.adapters.footprint import COPY_BYTES, STATE_BYTES
from orbit_jax.model.config import MeshShape
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import Device
from orbit_jax.plan.workload import Times, Traffic, Workload

_GRADIENT_BYTES = 4
BYTES_PER_TRAINED = COPY_BYTES + STATE_BYTES + _GRADIENT_BYTES
_RESIDUAL_BYTES = 4  # the residual stream is f32
_COMPUTE_BYTES = 2  # bf16
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
    rank: int
    trained_parameters: int
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
        }


def adapter_only(
    model: Model, device: Device, workload: Workload, rank: int, mesh: MeshShape = NODE
) -> AdapterOnly:
    """The figures of LoRA of that rank on all linear weights, experts included."""
    held = {
        "base_bytes_per_device": _base_bytes(model, mesh),
        "adapter_bytes_per_device": rank * _bytes_per_rank(model, mesh),
        "cache_bytes_per_device": workload.rows_at_once * _row_bytes(model, workload, mesh),
        "activation_bytes_per_device": _activation_bytes(model, workload),
    }
    compute = workload.seconds(
        device, mesh.size, OPERATIONS_PER_PARAMETER * model.active_parameters
    )
    total = sum(held.values())
    return AdapterOnly(
        model=model.name,
        device=device.name,
        rank=rank,
        trained_parameters=rank * (model.dense_widths + model.expert_widths),
        base_bytes=model.base_bytes,
        **held,
        bytes_per_device=total,
        fits=total <= workload.bytes_per_device(device),
        times=Times.of(device, compute, _sent(model, workload, rank, mesh)),
    )


def largest_batch(
    model: Model, device: Device, workload: Workload, rank: int, mesh: MeshShape = NODE
) -> int:
    """Rows of the workload's length that can be sampled at once; 0 without room for any."""
    left = _left(model, device, workload, mesh) - rank * _bytes_per_rank(model, mesh)
    return max(0, math.floor(left / _row_bytes(model, workload, mesh)))


def largest_rank(model: Model, device: Device, workload: Workload, mesh: MeshShape = NODE) -> int:
    """Of LoRA on all linear weights, beside the workload's rows; 0 without room for any."""
    left = _left(model, device, workload, mesh)
    left -= workload.rows_at_once * _row_bytes(model, workload, mesh)
    return max(0, math.floor(left / _bytes_per_rank(model, mesh)))


def _left(model: Model, device: Device, workload: Workload, mesh: MeshShape) -> float:
    """Memory of a device beside base and activations."""
    held = _base_bytes(model, mesh) + _activation_bytes(model, workload)
    return workload.bytes_per_device(device) - held


def _base_bytes(model: Model, mesh: MeshShape) -> float:
    """Of one device. What is replicated is bf16; what is sharded takes the rest of the bytes."""
    replicated = _COMPUTE_BYTES * model.replicated_parameters
    sharded = model.base_bytes - replicated
    if not model.experts:
        return replicated + sharded / mesh.tensor
    dense = _COMPUTE_BYTES * model.dense_parameters
    return replicated + dense / mesh.tensor + (sharded - dense) / mesh.size


def _bytes_per_rank(model: Model, mesh: MeshShape) -> float:
    """Of one device: its experts' adapters, and those of dense weights as if none were sharded."""
    return BYTES_PER_TRAINED * (model.dense_widths + model.expert_widths / mesh.size)


def _row_bytes(model: Model, workload: Workload, mesh: MeshShape) -> float:
    """Of one device and one cached row; heads that do not divide over `tensor` are on all of it."""
    parts = mesh.data * (1 if model.kv_heads % mesh.tensor else mesh.tensor)
    return workload.tokens_per_row * model.cache_bytes_per_token / parts


def _activation_bytes(model: Model, workload: Workload) -> float:
    """Of one device: the inputs of all layers, and one layer's dense weights widened."""
    inputs = model.layers * workload.micro_batch_tokens * model.hidden * _RESIDUAL_BYTES
    return inputs + _COMPUTE_BYTES * model.dense_parameters / model.layers


def _sent(model: Model, workload: Workload, rank: int, mesh: MeshShape) -> dict[str, Traffic]:
    """By purpose, of a device in a step; all of it within the node.

    The exchange of tokens is that of `model/moe.py`: gathered over `data`, each choice's output
    summed over `tensor` and scattered over `data`, which sends more than an all-to-all would.
    """
    tokens = workload.tokens / mesh.data  # of one data shard
    micro_batches = math.ceil(tokens / workload.micro_batch_tokens)
    over_data, over_tensor = (mesh.data - 1) / mesh.data, (mesh.tensor - 1) / mesh.tensor
    row = workload.tokens * model.sparse_layers * model.hidden * _COMPUTE_BYTES
    routing = row * (over_data * (1 + model.top_k) + 2 * over_tensor * model.top_k)
    dense = tokens * model.dense_outputs * _COMPUTE_BYTES * over_tensor
    # An expert's adapter lives on one device, so that only gradients of dense ones are reduced.
    gradients = rank * model.dense_widths * _GRADIENT_BYTES * 2 * (mesh.size - 1) / mesh.size
    return {
        "routing": Traffic(routing * _PASSES),
        "dense": Traffic(dense * _PASSES),
        "adapter": Traffic(gradients * micro_batches),
    }
