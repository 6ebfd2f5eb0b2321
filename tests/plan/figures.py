"""A model, a device and a step in round numbers, so that results can be worked out by hand."""

import dataclasses

from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import find
from orbit_jax.plan.workload import Workload

MODEL = Model(
    name="small",
    parameters=1000,
    expert_parameters=800,
    other_parameters=40,
    active_parameters=300,
    layers=2,
    sparse_layers=1,
    hidden=10,
    experts=16,
    top_k=2,
    dense_widths=50,
    expert_widths=160,
    dense_outputs=20,
    gathered_widths=30,
    cache_bytes_per_token=8,
    base_bytes=1000,
)
DEVICE = dataclasses.replace(
    find("b200"),
    memory_bytes=2800,
    bf16_flops=100.0,
    link_bytes_per_second=100.0,
    network_bytes_per_second=10.0,
)
WORKLOAD = Workload(
    rows=16,
    tokens_per_row=4,
    rows_at_once=8,
    micro_batch_tokens=1,
    utilisation=0.5,
    usable_memory=0.5,
)
