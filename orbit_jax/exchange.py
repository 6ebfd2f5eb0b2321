"""What devices tell each other inside `shard_map`: every collective of the forward pass.

Named scopes say what the bytes are for (`dense`, `routing`, `head`), which is how they are counted
in a compiled program. In a forward pass values are moved, or summed where all but one are zero: the
numbers are those of one device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.model.config import MeshShape
from orbit_jax.model.stream import Stream


def local_stream(shape: MeshShape, stream: Stream) -> Stream:
    """This data shard's tokens with rows counted from its first one."""
    if shape.size == 1:
        return stream
    rows = stream.num_rows // shape.data
    return _counted_from(stream, lax.axis_index("data") * rows, rows)


def own_rows_stream(shape: MeshShape, stream: Stream) -> Stream:
    """Of a data shard's tokens those of this device's own rows, counted from its first one."""
    if shape.tensor == 1:
        return stream
    rows = stream.num_rows // shape.tensor
    own = own_tokens_stream(shape, stream)
    return _counted_from(own, lax.axis_index("tensor") * rows, rows)


def own_tokens_stream(shape: MeshShape, stream: Stream) -> Stream:
    """The part of a data shard's tokens that this device attends from; rows are still counted in
    the shard."""
    fields = ("tokens", "rows", "positions")
    return stream.replace(**{f: own_tokens(shape, getattr(stream, f)) for f in fields})


def _counted_from(stream: Stream, first: jax.Array, rows: int) -> Stream:
    local = stream.rows - first
    # Rows of other shards and padding become padding; a negative row must not wrap.
    local = jnp.where((local >= 0) & (local < rows), local, rows)
    prefix = None if stream.prefix is None else stream.prefix - first
    return stream.replace(rows=local, num_rows=rows, prefix=prefix)


def own_tokens(shape: MeshShape, x: jax.Array) -> jax.Array:
    """This device's part `[N/t, ...]` of what all `t` tensor ranks of a data shard have."""
    if shape.tensor == 1:
        return x
    size = x.shape[0] // shape.tensor
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size)


@jax.named_scope("dense")
def gather_columns(shape: MeshShape, y: jax.Array) -> jax.Array:
    """The whole `[N, out]` from each device's columns."""
    return lax.all_gather(y, "tensor", axis=1, tiled=True) if shape.tensor > 1 else y


@jax.named_scope("dense")
def gather_tokens(shape: MeshShape, y: jax.Array) -> jax.Array:
    """The whole `[N, ...]` from each device's own tokens."""
    return lax.all_gather(y, "tensor", axis=0, tiled=True) if shape.tensor > 1 else y


@jax.named_scope("dense")
def heads_to_tokens(shape: MeshShape, x: jax.Array) -> jax.Array:
    """From own heads of all tokens `[N, H/t, ...]` to all heads of own tokens `[N/t, H, ...]`."""
    return _swap(shape, x, 0, 1)


@jax.named_scope("dense")
def tokens_to_heads(shape: MeshShape, x: jax.Array) -> jax.Array:
    """`heads_to_tokens` undone."""
    return _swap(shape, x, 1, 0)


@jax.named_scope("head")
def words_to_tokens(shape: MeshShape, logits: jax.Array) -> jax.Array:
    """From own words' logits of all tokens `[N, V/t]` to all logits of own tokens `[N/t, V]`."""
    return _swap(shape, logits, 0, 1)


@jax.named_scope("head")
def tokens_to_words(shape: MeshShape, x: jax.Array) -> jax.Array:
    """`words_to_tokens` undone."""
    return _swap(shape, x, 1, 0)


def _swap(shape: MeshShape, x: jax.Array, split: int, concat: int) -> jax.Array:
    return lax.all_to_all(x, "tensor", split, concat, tiled=True) if shape.tensor > 1 else x


@jax.named_scope("dense")
def columns_to_tokens(shape: MeshShape, y: jax.Array) -> jax.Array:
    """From own columns of all tokens `[N, D/t]` to own tokens `[N/t, D]`."""
    return _swap(shape, y, 0, 1)


@jax.named_scope("dense")
def pick_own_tokens(shape: MeshShape, x: jax.Array) -> jax.Array:
    """Own tokens `[N/t, D]` of `[N, D]`, of which one device has each row and the others zeros."""
    return lax.psum_scatter(x, "tensor", tiled=True) if shape.tensor > 1 else x


@jax.named_scope("adapter")
def gather_adapter(adapter: Adapter, stored: Adapter, read: Adapter) -> Adapter:
    """A layer's parameters as it reads them, out of this device's parts.

    `stored` and `read` are the partition specs of both, of the stacks. The gradient comes back as
    the sum that each device stores.
    """

    def gather(leaf: jax.Array, has: PartitionSpec, wants: PartitionSpec) -> jax.Array:
        for dim, axes in enumerate(has[1:]):
            kept = wants[dim + 1] if dim + 1 < len(wants) else None
            more = tuple(a for a in as_axes(axes) if a not in as_axes(kept))
            leaf = lax.all_gather(leaf, more, axis=dim, tiled=True) if more else leaf
        return leaf

    return jax.tree.map(gather, adapter, stored, read)


def as_axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes that one dimension of a partition spec names."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


@jax.named_scope("routing")
def gather_for_experts(shape: MeshShape, x: jax.Array) -> jax.Array:
    """Of all data shards' tokens `[N, ...]` the whole."""
    return lax.all_gather(x, "data", tiled=True) if shape.data > 1 else x


@jax.named_scope("routing")
def gather_from_tokens(shape: MeshShape, x: jax.Array) -> jax.Array:
    """Of all devices' own tokens `[N/t, ...]` the whole, all data shards'."""
    x = lax.all_gather(x, "tensor", tiled=True) if shape.tensor > 1 else x
    return gather_for_experts(shape, x)


@jax.named_scope("routing")
def sum_to_shards(shape: MeshShape, x: jax.Array) -> jax.Array:
    """This shard's part of the sum of what the data shards have for all tokens `[N, ...]`.

    The only sum of more than one value that is not zero: of a backward pass.
    """
    return lax.psum_scatter(x, "data", tiled=True) if shape.data > 1 else x


@jax.named_scope("routing")
def return_from_experts(shape: MeshShape, slots: jax.Array) -> jax.Array:
    """Own tokens `[N/t, k, D]` of this shard's slots, from all devices' `[all N, k, D]`.

    A slot has one contributor, the device with its expert; on the others it is zero.
    """
    slots = lax.psum_scatter(slots, "data", tiled=True) if shape.data > 1 else slots
    return lax.psum_scatter(slots, "tensor", tiled=True) if shape.tensor > 1 else slots
