"""Adapters on the mesh of a run beside training of all parameters on the nodes that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from orbit_jax.config import Config
from orbit_jax.model.config import MeshShape
from orbit_jax.plan import adapter_only, full_parameters
from orbit_jax.plan.adapter_only import AdapterOnly
from orbit_jax.plan.counts import Model
from orbit_jax.plan.devices import DEVICES_PER_NODE, Device
from orbit_jax.plan.full_parameters import PRECISIONS, FullParameters
from orbit_jax.plan.recommendation import recommendation
from orbit_jax.plan.workload import Times, Workload
from orbit_jax.rl.batch import token_buckets
from orbit_jax.runs.printing import size, table

# What is sent because it is trained; all else are tokens on their way.
_OF_THE_TRAINED = ("adapter", "weights", "gradients", "synchronisation")
_HEADS = ("", "nodes", "memory", "a device", "it sends", "seconds", "sending", "trained", "routing")
_SHARES = "by closed forms; sending as shares of a step, of it what is trained, and routing"


@dataclass(frozen=True)
class Comparison:
    """Both ways of training a model; of `full` the first is the ordinary one, the last the leanest.

    `largest` is what one node has room for: rows of the workload sampled at once by either way, the
    same for PPO with a critic and a reference, and the rank of LoRA on all linear weights. None
    where all parameters do not fit one.
    """

    model: Model
    device: Device
    workload: Workload
    adapter: AdapterOnly
    full: tuple[FullParameters, ...]
    largest: dict[str, int] | None

    def recommendation(self, price_per_device_hour: float) -> str:
        """A paragraph."""
        given = self.model, self.device, self.workload, self.adapter, self.full
        return recommendation(*given, price_per_device_hour)

    def to_json(self) -> dict:
        """Plain keys and numbers."""
        return {
            "adapters": self.adapter.to_json(),
            "all_parameters": [one.to_json() for one in self.full],
            "largest_on_one_node": self.largest,
        }


def workload_of(config: Config) -> Workload:
    """A step of a run; all rollouts as long as they may be."""
    sampler = config.sampler
    return Workload(
        rows=config.rows,
        tokens_per_row=sampler.max_prompt_tokens + sampler.max_completion_tokens,
        rows_at_once=config.decoded_rows,
        micro_batch_tokens=token_buckets(config)[-1].tokens // config.mesh.data,
    )


def compare(
    model: Model, device: Device, workload: Workload, trained: int, reduced: int, mesh: MeshShape
) -> Comparison:
    """Both ways; `trained` and `reduced` are the adapters' (see `adapter_only`)."""
    full = tuple(full_parameters.full_parameters(model, device, workload, p) for p in PRECISIONS)
    given, largest = (model, device, workload), None
    if full[0].nodes == 1:
        rows, all_parameters = adapter_only.largest_batch, (*given, PRECISIONS[0], 1)
        largest = {
            "rows_with_adapters": rows(*given, trained, mesh),
            "rows_with_all_parameters": full_parameters.largest_batch(*all_parameters),
            # The critic's adapter is taken for one like the policy's; the base is the reference.
            "ppo_rows_with_adapters": rows(*given, 2 * trained, mesh),
            "ppo_rows_with_all_parameters": full_parameters.largest_batch(
                *all_parameters, critic_and_reference=True
            ),
            "rank": adapter_only.largest_rank(*given, mesh),
        }
    adapter = adapter_only.adapter_only(*given, trained, reduced, mesh)
    return Comparison(*given, adapter, full, largest)


def show(found: Comparison, price_per_device_hour: float, console: Console) -> None:
    """Prints a comparison and what it comes to."""
    rows = [_adapters("adapters", found)]
    rows += [_all_parameters(one.precision.name, one) for one in found.full]
    table(console, f"adapters, or all parameters, {_SHARES}", _HEADS, rows)
    if found.largest:
        largest = {name: f"{value:,}" for name, value in found.largest.items()}
        rows = [
            ("rows at once", largest["rows_with_adapters"], largest["rows_with_all_parameters"]),
            (
                "with a critic and a reference",
                largest["ppo_rows_with_adapters"],
                largest["ppo_rows_with_all_parameters"],
            ),
            ("rank of LoRA on all weights", largest["rank"], "all parameters"),
        ]
        table(
            console, "the largest on one node", ("", "adapters", found.full[0].precision.name), rows
        )
    console.print()
    console.print(found.recommendation(price_per_device_hour), highlight=False)


def show_sizes(found: Sequence[Comparison], console: Console) -> None:
    """Prints the two ways of each of several models."""
    rows = []
    for one in found:
        rows.append(_adapters(f"{one.model.name}, adapters", one))
        rows.append(_all_parameters(f"{one.model.name}, all", one.full[0]))
    console.print()
    console.print(f"all parameters in {PRECISIONS[0].name}")
    table(console, f"adapters, or all parameters, {_SHARES}", _HEADS, rows)


def _adapters(name: str, found: Comparison) -> tuple[str, ...]:
    one = found.adapter
    nodes = -(-one.devices // DEVICES_PER_NODE)
    fits = f"{nodes}" if one.fits else "no fit"
    return _row(name, fits, one.bytes_per_device, one.devices, one.times)


def _all_parameters(name: str, one: FullParameters) -> tuple[str, ...]:
    return _row(name, f"{one.nodes:,}", one.bytes_per_device, one.devices, one.times)


def _row(
    name: str, nodes: str, bytes_per_device: float, devices: int, times: Times
) -> tuple[str, ...]:
    trained = [purpose for purpose in _OF_THE_TRAINED if purpose in times.sent]
    sent = sum(one.link_bytes + one.network_bytes for one in times.sent.values())
    return (
        name,
        nodes,
        size(bytes_per_device * devices),
        size(bytes_per_device),
        size(sent),
        f"{times.step:,.1f}" if times.step >= 1 else f"{times.step:.2g}",
        f"{times.share():.1%}",
        f"{times.share(*trained):.1%}",
        f"{times.share('routing'):.1%}",
    )
