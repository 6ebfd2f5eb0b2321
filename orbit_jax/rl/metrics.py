"""Metrics from inside the step: sums over tokens, so that splits into micro-batches do not show."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Sums:
    """Running totals of one or more micro-batches.

    Attributes:
      losses: what the update minimises, by name: shares of micro-batches that add up.
      totals: sums over the trained tokens by name; maxima: over all that were sampled.
      count: trained tokens.
      load: [sparse layers, E] int32, how often each expert was chosen.
    """

    losses: dict[str, jax.Array]
    totals: dict[str, jax.Array]
    maxima: dict[str, jax.Array]
    count: jax.Array
    load: jax.Array

    @classmethod
    def of(
        cls,
        losses: dict[str, jax.Array],
        totals: dict[str, jax.Array],
        trained: jax.Array,
        load: jax.Array,
        maxima: dict[str, jax.Array] | None = None,
        sampled: jax.Array | None = None,
    ) -> "Sums":
        """Reduces per-token arrays [N]; a maximum is over values that cannot be negative."""
        masked = lambda x, on: lax.stop_gradient(jnp.where(on, x, 0.0))  # noqa: E731
        return cls(
            losses=jax.tree.map(lax.stop_gradient, losses),
            totals={k: masked(v, trained).sum() for k, v in totals.items()},
            maxima={k: masked(v, sampled).max() for k, v in (maxima or {}).items()},
            count=trained.sum(),
            load=load,
        )

    def merge(self, other: "Sums") -> "Sums":
        """Totals add up, maxima are compared."""
        return Sums(
            losses=jax.tree.map(jnp.add, self.losses, other.losses),
            totals=jax.tree.map(jnp.add, self.totals, other.totals),
            maxima=jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            count=self.count + other.count,
            load=self.load + other.load,
        )

    def finish(self) -> dict[str, jax.Array]:
        """Scalars; a leading dimension of updates is folded in, losses by their mean."""
        updates = jnp.maximum((self.count > 0).sum(), 1)
        losses = {k: v.sum() / updates for k, v in self.losses.items()}
        count = jnp.maximum(self.count.sum(), 1)
        means = {k: v.sum() / count for k, v in self.totals.items()}
        maxima = {k: v.max() for k, v in self.maxima.items()}
        return (
            losses
            | means
            | maxima
            | load_spread(self.load.sum(axis=tuple(range(self.load.ndim - 2))))
        )


def load_spread(load: jax.Array) -> dict[str, jax.Array]:
    """How unevenly experts are used, from [sparse layers, E] counts; nothing for dense models."""
    if not load.size:
        return {}
    share = load / jnp.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    return {
        "router/load_max_over_mean": share.max(),
        "router/unused_experts": (load == 0).sum(),
    }


def group_norms(tree: dict) -> dict[str, jax.Array]:
    """Euclidean norms of the policy, of the critic, and of each kind of adapted weight.

    A kind is the module name, such as `policy/experts.gate_proj`.
    """
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        kinds = [names[0]]  # no set: its order, and with it the program, would change by process
        if "layers" in names:
            module = names[names.index("layers") + 1 : -1]
            kinds.append(f"{names[0]}/{'.'.join(module[1:] if len(module) > 1 else module)}")
        for kind in kinds:
            squares[kind] = squares.get(kind, 0.0) + jnp.square(leaf.astype(jnp.float32)).sum()
    return {kind: jnp.sqrt(value) for kind, value in squares.items()}
