"""Adapters on one node or all parameters on several: what the figures say, in a few sentences."""

from collections.abc import Sequence

from orbit_jax.plan.adapter_only import AdapterOnly
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import DEVICES_PER_NODE, Device
from orbit_jax.plan.full_parameters import FullParameters
from orbit_jax.plan.workload import Workload
from orbit_jax.runs.printing import quantity, size


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
        f"With adapters of {quantity(adapter.trained_parameters)} parameters "
        f"({_share(model, adapter)}), {model.name} takes {size(adapter.bytes_per_device)} of the "
        f"{size(room)} that may be planned on each {device.name}, so it {verdict} "
        f"{_count(adapter.devices, 'device')}."
    )


def _nodes(usual: FullParameters, leanest: FullParameters) -> str:
    return (
        f"Training all parameters in {usual.precision.name} keeps "
        f"{usual.precision.bytes_per_parameter:g} bytes of each, "
        f"{size(usual.state_bytes + usual.rollout_bytes)} with the copy for rollouts, and "
        f"needs {_count(usual.nodes, 'node')}; {leanest.precision.name}, which leaves no optimiser "
        f"state, would need {_count(leanest.nodes, 'node')}."
    )


def _cost(workload: Workload, adapter: AdapterOnly, usual: FullParameters, price: float) -> str:
    def cost(devices: int, seconds: float) -> float:
        return devices * seconds * price / 3600

    ours = cost(adapter.devices, adapter.times.step)
    theirs = cost(usual.devices, usual.times.step)
    return (
        f"A step of {workload.tokens:,} tokens takes about {adapter.times.step:.0f} s and "
        f"{ours:.2f} on {_count(adapter.devices, 'device')} with adapters, "
        f"{usual.times.step:.0f} s and {theirs:.2f} on {_count(usual.devices, 'device')} with all "
        f"parameters, at {price:g} per device hour, {workload.utilisation:.0%} of the bf16 peak "
        f"and nothing overlapped; communication is {adapter.times.share():.0%} and "
        f"{usual.times.share():.0%} of that (left out of both is that decoding reads the weights "
        "for every token, which the roofline of a compiled plan has)."
    )


def _precision(model: Model, usual: FullParameters) -> str:
    bits = 8 * model.base_bytes / model.parameters
    synchronised = usual.times.sent["synchronisation"]
    moved = usual.devices * (synchronised.link_bytes + synchronised.network_bytes)
    return (
        f"Adapters leave the released weights as they are, {size(model.base_bytes)} at "
        f"{bits:.1f} bits a parameter, read by sampler and trainer alike; with all parameters "
        f"{size(moved)} of new weights move to the rollouts in every step, and a low-bit "
        f"model has to be made anew from {usual.precision.weights:g}-byte weights at the end."
    )


def _choice(
    model: Model, device: Device, workload: Workload, adapter: AdapterOnly, usual: FullParameters
) -> str:
    nodes = -(-adapter.devices // DEVICES_PER_NODE)
    if usual.nodes == 1:
        return (
            "All parameters fit the same single node, so train them unless a base of "
            f"{size(model.base_bytes)} that stays as it was is what you want to keep: "
            f"adapters train {_share(model, adapter)} of them."
        )
    if adapter.base_bytes_per_device > workload.bytes_per_device(device):
        return (
            f"The frozen base alone takes {size(adapter.base_bytes_per_device)} of each "
            f"device, so no adapter fits 1 node of {device.name}: take devices with more memory, "
            f"or {usual.nodes} nodes and all parameters."
        )
    if not adapter.fits:
        return (
            f"Neither way fits 1 node as it stands: train fewer than "
            f"{quantity(adapter.trained_parameters)} parameters or sample fewer rows at once, or "
            f"train all parameters if you have {usual.nodes} nodes."
        )
    return (
        f"Take all parameters if the shift is as large as in pretraining, which the "
        f"{_share(model, adapter)} that adapters train may not hold, and you have {usual.nodes} "
        f"nodes and the people to run them; otherwise the {_count(nodes, 'node')} with adapters."
    )


def _share(model: Model, adapter: AdapterOnly) -> str:
    return f"{adapter.trained_parameters / model.parameters:.2%}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
