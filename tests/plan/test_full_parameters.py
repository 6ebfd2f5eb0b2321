"""Training all parameters, against numbers worked out by hand (see `figures.py`)."""

import dataclasses
import json

import pytest
from figures import DEVICE, MODEL, WORKLOAD

from orbit_jax.plan.counts import preset
from orbit_jax.plan.devices import find
from orbit_jax.plan.full_parameters import PRECISIONS, full_parameters, largest_batch
from orbit_jax.plan.workload import Traffic, Workload

ADAM, EIGHT_BIT, ALONE = PRECISIONS


def test_bytes_of_a_parameter():
    assert [precision.bytes_per_parameter for precision in PRECISIONS] == [16, 10, 2]


def test_memory_is_spread_over_the_fewest_nodes_that_hold_it():
    row = full_parameters(MODEL, DEVICE, WORKLOAD, ADAM)
    assert (row.state_bytes, row.rollout_bytes) == (16_000, 2_000)
    assert row.cache_bytes == 8 * 4 * 8
    # Two layers' inputs of one token of 10, and half of the 160 dense parameters, in bf16.
    assert row.activation_bytes_per_device == 2 * (2 * 10 + 80)
    # 18,256 bytes over devices with 1,400 - 200 to spare: 15.2 of them.
    assert (row.nodes, row.devices) == (2, 16)
    assert row.bytes_per_device == 18_256 / 16 + 200


def test_the_leanest_way_keeps_no_copy_and_needs_fewer_nodes():
    row = full_parameters(MODEL, DEVICE, WORKLOAD, ALONE)
    assert (row.state_bytes, row.rollout_bytes, row.nodes) == (2_000, 0, 1)
    assert row.times.sent["synchronisation"] == Traffic()


def test_what_a_device_sends_in_a_step():
    sent = full_parameters(MODEL, DEVICE, WORKLOAD, ADAM).times.sent
    # A gather of the 200 parameters that are no experts: 7/8 by links, half / 8 between 2 nodes;
    # 4 tokens a device are 4 micro-batches; weights twice in 2 bytes, gradients once in 2.
    assert sent["weights"] == Traffic(175 * 4 * 4, 12.5 * 4 * 4)
    assert sent["gradients"] == Traffic(175 * 4 * 2, 12.5 * 4 * 2)
    # 4 tokens x 2 experts x 10 x 2 bytes, there and back, 4 passes; 7 of 16 holders are near.
    assert sent["routing"] == Traffic(160 * 8 * 7 / 16, 160 * 8 * 8 / 16)
    assert sent["synchronisation"] == Traffic(125 * 7 / 16, 125 / 2)


def test_devices_that_share_an_expert_gather_it_over_the_network():
    few = dataclasses.replace(MODEL, experts=8)
    sent = full_parameters(few, DEVICE, WORKLOAD, ADAM).times.sent
    assert sent["weights"] == Traffic(175 * 16, (12.5 + 100 / 2) * 16)
    assert sent["routing"] == Traffic(160 * 8 * 7 / 8, 0)


def test_times_of_a_step():
    times = full_parameters(MODEL, DEVICE, WORKLOAD, ADAM).times
    assert times.compute == 64 * 8 * 300 / (16 * 0.5 * 100)
    # The slower of links at 100 bytes per second and the network at 10.
    assert times.communication == {
        "weights": 28.0,
        "gradients": 14.0,
        "routing": 64.0,
        "synchronisation": 6.25,
    }
    assert times.step == 192 + 112.25
    assert times.share() == 112.25 / 304.25
    assert times.share("routing") == 64 / 304.25


def test_the_largest_batch_is_the_last_that_needs_no_further_node():
    rows = largest_batch(MODEL, DEVICE, WORKLOAD, ADAM, nodes=2)
    assert rows == (16 * 1200 - 18_000) // (4 * 8)
    for more, nodes in ((0, 2), (1, 3)):
        workload = dataclasses.replace(WORKLOAD, rows_at_once=rows + more)
        assert full_parameters(MODEL, DEVICE, workload, ADAM).nodes == nodes
    assert largest_batch(MODEL, DEVICE, WORKLOAD, ADAM, nodes=1) == 0


def test_a_micro_batch_that_fits_no_device_is_refused():
    workload = dataclasses.replace(WORKLOAD, micro_batch_tokens=100)
    with pytest.raises(ValueError, match=r"micro_batch_tokens=100 takes .* of b200: lower it"):
        full_parameters(MODEL, DEVICE, workload, ADAM)


def test_a_row_is_plain_json():
    found = json.loads(json.dumps(full_parameters(MODEL, DEVICE, WORKLOAD, ADAM).to_json()))
    assert found["nodes"] == 2
    assert found["bytes_per_parameter"] == 16
    assert found["step_seconds"] == 304.25
    assert found["times"]["sent"]["routing"] == {"link_bytes": 560, "network_bytes": 640}


def test_a_trillion_parameters_with_adam_are_16_terabytes_and_many_nodes():
    rows = [full_parameters(preset("1t"), find("b200"), Workload(), p) for p in PRECISIONS]
    assert rows[0].state_bytes == pytest.approx(16.4e12, rel=0.01)
    assert [row.nodes for row in rows] == [14, 9, 2]
