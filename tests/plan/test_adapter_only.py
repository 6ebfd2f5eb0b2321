"""Training adapters on one node, against numbers worked out by hand (see `figures.py`)."""

import dataclasses
import json

from figures import DEVICE, MODEL, WORKLOAD

from orbit_jax.plan.adapter_only import adapter_only, largest_batch, largest_rank
from orbit_jax.plan.counts import preset
from orbit_jax.plan.devices import find
from orbit_jax.plan.workload import Traffic, Workload

ROOMY = dataclasses.replace(DEVICE, memory_bytes=8000)  # of which half is planned


def test_what_a_device_holds():
    row = adapter_only(MODEL, ROOMY, WORKLOAD, rank=2)
    # 40 parameters replicated and 160 over tensor in bf16, the other 600 bytes over all devices.
    assert row.base_bytes_per_device == 80 + 320 / 4 + 600 / 8
    assert row.trained_parameters == 2 * (50 + 160)
    # bf16 copy, f32 master, two moments and gradient: 18 bytes; an eighth of those on experts.
    assert row.adapter_bytes_per_device == 2 * 18 * (50 + 20)
    assert row.cache_bytes_per_device == 8 * 4 * 8 / 8
    assert row.activation_bytes_per_device == 2 * 10 * 4 + 2 * 160 / 2
    assert row.bytes_per_device == 235 + 2520 + 32 + 240
    assert row.fits
    assert not adapter_only(MODEL, DEVICE, WORKLOAD, rank=2).fits


def test_heads_that_do_not_divide_over_tensor_are_cached_on_all_of_it():
    one_head = dataclasses.replace(MODEL, kv_heads=1)
    row = adapter_only(one_head, ROOMY, WORKLOAD, rank=2)
    assert row.cache_bytes_per_device == 8 * 4 * 8 / 2


def test_a_dense_base_is_spread_over_tensor():
    dense = dataclasses.replace(MODEL, experts=0, expert_parameters=0, expert_widths=0)
    row = adapter_only(dense, ROOMY, WORKLOAD, rank=2)
    assert row.base_bytes_per_device == 80 + 920 / 4


def test_what_a_device_sends_stays_within_the_node():
    times = adapter_only(MODEL, ROOMY, WORKLOAD, rank=2).times
    # 64 tokens of 10 in bf16: gathered over 2, summed for 2 experts over 4, scattered over 2.
    routing = 4 * 1280 * (1 / 2 + 2 * 2 * 3 / 4 + 2 / 2)
    # 32 tokens of a shard x 20 outputs in bf16, of which three quarters come from others.
    dense = 4 * 32 * 20 * 2 * 3 / 4
    # Gradients of 100 parameters, all-reduced over 8 in each of 32 micro-batches.
    adapter = 32 * 100 * 4 * 2 * 7 / 8
    assert times.sent == {
        "routing": Traffic(routing),
        "dense": Traffic(dense),
        "adapter": Traffic(adapter),
    }
    assert times.compute == 64 * 6 * 300 / (8 * 0.5 * 100)
    assert times.step == 288 + (routing + dense + adapter) / 100


def test_the_largest_batch_and_rank_are_the_last_that_fit():
    rows = largest_batch(MODEL, ROOMY, WORKLOAD, rank=2)
    assert rows == (4000 - 475 - 2520) // 4
    rank = largest_rank(MODEL, ROOMY, WORKLOAD)
    assert rank == (4000 - 475 - 32) // 1260
    for more, fits in ((0, True), (1, False)):
        workload = dataclasses.replace(WORKLOAD, rows_at_once=rows + more)
        assert adapter_only(MODEL, ROOMY, workload, rank=2).fits == fits
        assert adapter_only(MODEL, ROOMY, WORKLOAD, rank=rank + more).fits == fits
    assert largest_batch(MODEL, DEVICE, WORKLOAD, rank=2) == 0
    tight = dataclasses.replace(DEVICE, memory_bytes=900)
    assert largest_rank(MODEL, tight, WORKLOAD) == 0


def test_a_row_is_plain_json():
    row = adapter_only(MODEL, ROOMY, WORKLOAD, rank=2)
    found = json.loads(json.dumps(row.to_json()))
    assert found["step_seconds"] == row.times.step
    assert found["communication_share_without_routing"] == (3840 + 22_400) / 100 / row.times.step
    assert found["base_bytes"] == 1000


def test_a_trillion_parameters_fit_a_node_of_b200_and_not_one_of_h100():
    model, workload = preset("1t"), Workload()
    row = adapter_only(model, find("b200"), workload, rank=16)
    assert row.fits
    assert 0.42 < 8 * row.base_bytes_per_device / (8 * find("b200").memory_bytes) < 0.43
    assert not adapter_only(model, find("h100"), workload, rank=16).fits
