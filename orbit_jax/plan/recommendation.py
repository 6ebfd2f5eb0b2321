"""Adapters on one node or all parameters on several: what the figures say, in a few sentences."""

from collections.abc import Sequence

from orbit_jax.plan.adapter_only import AdapterOnly
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import DEVICES_PER_NODE, Device
from orbit_jax.plan.full_parameters import FullParameters
from orbit_jax.plan.workload import Workload


def recommendation(
    model: Model,
    device: Device,
    workload: Workload,
    adapter: AdapterOnly,
    full: Sequence[FullParameters],
    price_per_device_hour: float,
) -> str:
    """Reasons with a number in each, a paragraph.

    Args:
      adapter, full: rows for this model, device and workload; of `full` the first is the ordinary
        way, the last the leanest.
      price_per_device_hour: in any currency.
    """
    usual, leanest = full[0], full[-1]
    return " ".join(
        (
            _fit(model, device, workload, adapter),
            _nodes(usual, leanest),
            _cost(workload, adapter, usual, price_per_device_hour),
            _precision(model, usual),
            _choice(model, device, workload, adapter, usual),
        )
    )


def _fit(model: Model, device: Device, workload: Workload, adapter: AdapterOnly) -> str:
    room = workload.bytes_per_device(device)
    verdict = "fits" if adapter.fits else "does not fit"
    return (
        f"With adapters of rank {adapter.rank}, {model.name} takes "
        f"{_gigabytes(adapter.bytes_per_device)} of the {_gigabytes(room)} that may be planned on "
        f"each {device.name}, so it {verdict} one node of {DEVICES_PER_NODE}."
    )


def _nodes(usual: FullParameters, leanest: FullParameters) -> str:
    return (
        f"Training all parameters in {usual.precision.name} keeps "
        f"{usual.precision.bytes_per_parameter:g} bytes of each, "
        f"{_gigabytes(usual.state_bytes + usual.rollout_bytes)} with the copy for rollouts, and "
        f"needs {_count(usual.nodes, 'node')}; {leanest.precision.name}, which leaves no optimiser "
        f"state, would need {_count(leanest.nodes, 'node')}."
    )


def _cost(workload: Workload, adapter: AdapterOnly, usual: FullParameters, price: float) -> str:
    def cost(devices: int, seconds: float) -> float:
        return devices * seconds * price / 3600

    ours = cost(DEVICES_PER_NODE, adapter.times.step)
    theirs = cost(usual.devices, usual.times.step)
    return (
        f"A step of {workload.tokens:,} tokens takes about {adapter.times.step:.0f} s and "
        f"{ours:.2f} on the node with adapters, {usual.times.step:.0f} s and {theirs:.2f} on "
        f"{usual.devices} devices with all parameters, at {price:g} per device hour, "
        f"{workload.utilisation:.0%} of the bf16 peak and nothing overlapped; communication is "
        f"{adapter.times.share():.0%} and {usual.times.share():.0%} of that."
    )


def _precision(model: Model, usual: FullParameters) -> str:
    bits = 8 * model.base_bytes / model.parameters
    synchronised = usual.times.sent["synchronisation"]
    moved = usual.devices * (synchronised.link_bytes + synchronised.network_bytes)
    return (
        f"Adapters leave the released weights as they are, {_gigabytes(model.base_bytes)} at "
        f"{bits:.1f} bits a parameter, read by sampler and trainer alike; with all parameters "
        f"{_gigabytes(moved)} of new weights move to the rollouts in every step, and a low-bit "
        f"model has to be made anew from {usual.precision.weights:g}-byte weights at the end."
    )


def _choice(
    model: Model, device: Device, workload: Workload, adapter: AdapterOnly, usual: FullParameters
) -> str:
    share = adapter.trained_parameters / model.parameters
    if usual.nodes == 1:
        return (
            "All parameters fit the same single node, so train them unless a base of "
            f"{_gigabytes(model.base_bytes)} that stays as it was is what you want to keep: "
            f"adapters train {share:.2%} of them."
        )
    if adapter.base_bytes_per_device > workload.bytes_per_device(device):
        return (
            f"The frozen base alone takes {_gigabytes(adapter.base_bytes_per_device)} of each "
            f"device, so no adapter fits 1 node of {device.name}: take devices with more memory, "
            f"or {usual.nodes} nodes and all parameters."
        )
    if not adapter.fits:
        return (
            f"Neither way fits 1 node as it stands: lower the rank of {adapter.rank} or the rows "
            f"sampled at once, or train all parameters if you have {usual.nodes} nodes."
        )
    return (
        f"Take all parameters if the shift is as large as in pretraining, which the "
        f"{share:.2%} that adapters train may not hold, and you have {usual.nodes} nodes and the "
        f"people to run them; otherwise the 1 node with adapters."
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:,.1f} GB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
