"""The table of accelerators."""

import re

import pytest

from orbit_jax.plan.devices import find

NAMES = ("h100", "h200", "b200", "b300")


def test_a_device_is_found_in_any_case():
    assert find("B200") is find("b200")
    assert find("h200").name == "h200"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b20", r"device=b20 is not known: did you mean b200\? known are h100, h200, b200, b300"),
        ("tpu", r"device=tpu is not known: known are h100, h200, b200, b300"),
    ],
)
def test_an_unknown_device_is_refused_with_those_that_are_known(name, message):
    with pytest.raises(ValueError, match=message):
        find(name)


@pytest.mark.parametrize(
    ("name", "gigabytes", "terabytes_per_second", "petaflops"),
    [
        ("h100", 80, 3.35, 0.99),
        ("h200", 141, 4.8, 0.99),
        ("b200", 180, 8.0, 2.25),
        ("b300", 288, 8.0, 2.25),
    ],
)
def test_figures_are_near_the_data_sheet(name, gigabytes, terabytes_per_second, petaflops):
    device = find(name)
    # Sheets count in 10**9 or 2**30 as it suits them.
    assert device.memory_bytes / 1e9 == pytest.approx(gigabytes, rel=0.08)
    assert device.memory_bytes_per_second / 1e12 == pytest.approx(terabytes_per_second, rel=0.05)
    assert device.bf16_flops / 1e15 == pytest.approx(petaflops, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_faster_than_links_and_links_than_the_network(name):
    device = find(name)
    rates = (
        device.memory_bytes_per_second,
        device.link_bytes_per_second,
        device.network_bytes_per_second,
    )
    assert rates[0] > 5 * rates[1] > 25 * rates[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_is_told_the_same_figures(name):
    device = find(name)
    told = dict(re.findall(r"(\w+): (\S+)", device.target_config))
    assert int(told["device_memory_size"]) == device.memory_bytes
    assert int(told["memory_bandwidth"]) == device.memory_bytes_per_second
    assert int(told["core_count"]) == device.cores
    assert f"major: {device.compute_capability[0]}" in device.target_config
    assert device.target_config.count("{") == device.target_config.count("}")
