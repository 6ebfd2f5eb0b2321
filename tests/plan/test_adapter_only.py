"""Training adapters on one node, against numbers worked out by hand (see `figures.py`)."""

import dataclasses
import json

import pytest
from figures import DEVICE, MODEL, WORKLOAD

from orbit_jax.model.config import MeshShape
from orbit_jax.plan.adapter_only import (
    adapter_only,
    largest_batch,
    largest_rank,
    lora_parameters,
)
from orbit_jax.plan.counts import preset
from orbit_jax.plan.devices import find
from orbit_jax.plan.workload import Traffic, Workload

ROOMY = dataclasses.replace(DEVICE, memory_bytes=8000)  # of which half is planned
TRAINED = {"trained": 420, "reduced": 100}


def test_parameters_of_a_rank():
    assert lora_parameters(MODEL, 2) == (2 * (50 + 160), 2 * 50)


def test_what_a_device_holds():
    row = adapter_only(MODEL, ROOMY, WORKLOAD, **TRAINED)
    # 200 parameters that are no experts over tensor in bf16, the other 600 bytes over all devices.
    assert row.base_bytes_per_device == 400 / 4 + 600 / 8
    # Master, two moments and three kinds of gradient in f32, a part of each on every device.
    assert row.adapter_bytes_per_device == 24 * 420 / 8
    assert row.cache_bytes_per_device == 8 * 4 * 8 / 8
    # Two layers' inputs of a token of 10 in f32, and half of 160 dense parameters in bf16, over
    # tensor; slots for the two choices of both data shards' tokens.
    assert row.activation_bytes_per_device == 2 * 10 * 4 / 4 + 2 * 80 / 4 + 2 * 2 * 10 * 2
    assert row.bytes_per_device == 175 + 1260 + 32 + 140
    assert row.fits
    assert not adapter_only(MODEL, DEVICE, WORKLOAD, **TRAINED).fits


def test_a_dense_base_is_spread_over_tensor_and_has_no_slots():
    dense = dataclasses.replace(MODEL, experts=0, expert_parameters=0, expert_widths=0)
    row = adapter_only(dense, ROOMY, WORKLOAD, **TRAINED)
    assert row.base_bytes_per_device == 1000 / 4
    assert row.activation_bytes_per_device == 2 * 10 * 4 / 4 + 2 * 960 / 2 / 4


def test_what_a_device_sends_stays_within_the_node():
    times = adapter_only(MODEL, ROOMY, WORKLOAD, **TRAINED).times
    # 64 tokens of 10 in bf16: two choices forward and in sampling, and a cotangent, over 8; over 2
    # data shards once in each pass, and the gradient of the input.
    routing = 1280 * ((2 * 2 + 1) * 7 / 8 + (3 + 1) / 2)
    # 32 tokens of a shard x 30 gathered and a fourth of 20 outputs in bf16, in four passes, of
    # which three quarters come from others.
    dense = 4 * 32 * (30 + 20 / 4) * 2 * 3 / 4
    # 100 parameters in f32, gathered twice and reduced once in each of 32 micro-batches.
    adapter = 32 * 3 * 100 * 4 * 7 / 8
    assert times.sent == {
        "routing": Traffic(routing),
        "dense": Traffic(dense),
        "adapter": Traffic(adapter),
    }
    assert times.compute == 64 * 6 * 300 / (8 * 0.5 * 100)
    assert times.step == 288 + (routing + dense + adapter) / 100


def test_one_device_sends_nothing():
    sent = adapter_only(MODEL, ROOMY, WORKLOAD, **TRAINED, mesh=MeshShape()).times.sent
    assert set(sent.values()) == {Traffic()}


def test_the_largest_batch_and_rank_are_the_last_that_fit():
    rows = largest_batch(MODEL, ROOMY, WORKLOAD, trained=420)
    assert rows == (4000 - 315 - 1260) // 4
    rank = largest_rank(MODEL, ROOMY, WORKLOAD)
    assert rank == (4000 - 315 - 32) // (24 * 210 // 8)
    for more, fits in ((0, True), (1, False)):
        workload = dataclasses.replace(WORKLOAD, rows_at_once=rows + more)
        assert adapter_only(MODEL, ROOMY, workload, **TRAINED).fits == fits
        trained = lora_parameters(MODEL, rank + more)
        assert adapter_only(MODEL, ROOMY, WORKLOAD, *trained).fits == fits
    assert largest_batch(MODEL, DEVICE, WORKLOAD, trained=420) == 0
    tight = dataclasses.replace(DEVICE, memory_bytes=600)
    assert largest_rank(MODEL, tight, WORKLOAD) == 0


def test_a_row_is_plain_json():
    row = adapter_only(MODEL, ROOMY, WORKLOAD, **TRAINED)
    found = json.loads(json.dumps(row.to_json()))
    assert found["step_seconds"] == row.times.step
    assert found["communication_share_without_routing"] == (67.2 + 336) / row.times.step
    assert found["communication_share_of_adapters"] == 336 / row.times.step
    assert found["base_bytes"] == 1000


def test_a_trillion_parameters_fit_a_node_of_b200_and_not_one_of_h100():
    model, workload = preset("1t"), Workload()
    trained = lora_parameters(model, 16)
    row = adapter_only(model, find("b200"), workload, *trained)
    assert row.fits
    assert row.base_bytes_per_device == pytest.approx(0.40 * find("b200").memory_bytes, rel=0.02)
    assert not adapter_only(model, find("h100"), workload, *trained).fits
