"""The sentences that are made of figures."""

import re

import pytest

from orbit_jax.plan.adapter_only import adapter_only, lora_parameters
from orbit_jax.plan.counts import preset
from orbit_jax.plan.devices import find
from orbit_jax.plan.full_parameters import PRECISIONS, full_parameters
from orbit_jax.plan.recommendation import recommendation
from orbit_jax.plan.workload import Workload

WORKLOAD = Workload()


def recommended(size: str, device: str = "b200", rank: int = 16) -> str:
    model, found = preset(size), find(device)
    full = [full_parameters(model, found, WORKLOAD, p) for p in PRECISIONS]
    adapter = adapter_only(model, found, WORKLOAD, *lora_parameters(model, rank))
    return recommendation(model, found, WORKLOAD, adapter, full, price_per_device_hour=4.0)


@pytest.mark.parametrize("size", ["7b", "70b", "1t", "1.6t", "50t"])
def test_every_sentence_carries_a_number(size):
    sentences = re.split(r"(?<=[.])\s+(?=[A-Z])", recommended(size))
    assert len(sentences) == 5
    for sentence in sentences:
        assert re.search(r"\d", sentence), sentence


@pytest.mark.parametrize(
    ("size", "device", "rank", "advice"),
    [
        ("7b", "b200", 16, "All parameters fit the same single node, so train them unless"),
        ("1t", "b200", 16, "Take all parameters if the shift .* you have 14 nodes and the people"),
        ("1.6t", "b200", 64, "Neither way fits 1 node as it stands: train fewer than 4.* G"),
        ("50t", "b200", 1, "The frozen base alone takes 3.5. TB of each device, so no adapter"),
        ("1.6t", "h100", 1, "The frozen base alone takes 1.* GB of each device"),
    ],
)
def test_the_advice_follows_from_what_fits(size, device, rank, advice):
    assert re.search(advice, recommended(size, device, rank))


def test_figures_are_those_of_the_rows():
    model, device = preset("1t"), find("b200")
    text = recommended("1t")
    adapter = adapter_only(model, device, WORKLOAD, *lora_parameters(model, 16))
    usual = full_parameters(model, device, WORKLOAD, PRECISIONS[0])
    assert "With adapters of 10.3 G parameters (1.00%), 1t" in text
    assert f"takes {adapter.bytes_per_device / 1e9:.2f} GB of the 180.02 GB" in text
    assert "so it fits 8 devices." in text
    assert "16 bytes of each, 18.48 TB with the copy for rollouts, and needs 14 nodes" in text
    assert "would need 2 nodes" in text
    cost = usual.devices * usual.times.step * 4 / 3600
    assert f"{usual.times.step:.0f} s and {cost:.2f} on 112 devices" in text
    assert f"{8 * adapter.times.step * 4 / 3600:.2f} on 8 devices with adapters" in text
    assert "594.21 GB at 4.6 bits a parameter" in text
    # All but what stays on its device, of 2 bytes for each of 1.026e12 parameters.
    assert f"{2 * model.parameters * 111 / 112 / 1e12:,.2f} TB of new weights move" in text
