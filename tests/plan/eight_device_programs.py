"""Programs compiled for eight simulated devices, in a process of its own: prints their texts.

Axes are `data` (2) and `tensor` (4). Local activations are f32[16,64], 4096 bytes.
"""

import json

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
SPECS = (P("data"), P(None, None, "tensor"), P())
SHAPES = ((32, 64), (5, 64, 64), (5, 64, 64))


def arguments() -> list[jax.ShapeDtypeStruct]:
    """Rows, and the weights and adapters of five layers."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))
        for shape, spec in zip(SHAPES, SPECS, strict=True)
    ]


def on_devices(fn):
    return jax.shard_map(
        fn, mesh=MESH, in_specs=SPECS, out_specs=P("data", "tensor"), check_vma=False
    )


def dense(x, w):
    with jax.named_scope("dense"):
        return lax.all_gather(x @ w, "tensor", axis=1, tiled=True)


def layer(x, weights):
    w, adapter = weights
    y = dense(x, w)
    with jax.named_scope("routing"):
        everyone = lax.all_gather(y, "data", tiled=True)
        y = lax.psum_scatter(lax.psum(2 * everyone, "tensor"), "data", tiled=True)
    return y + y @ adapter, None


def layers(x, w, adapter):
    y, _ = lax.scan(layer, x, (w, adapter))
    return y.sum()[None, None]


def loss(adapter, x, w):
    with jax.named_scope("adapter"):
        return on_devices(layers)(x, w, adapter).sum()


def decode(x, w, adapter):
    """Three layers before a loop of unknown length, which has three layers in each turn."""

    def three(x):
        return lax.fori_loop(0, 3, lambda i, x: jnp.sin(dense(x, w[i])), x)

    def unfinished(x):
        return x[0, 0] < adapter[0, 0, 0]

    x = lax.while_loop(unfinished, three, three(x))
    return x.sum()[None, None]


def two_loops(x, w, adapter):
    """Two loops of unknown length; a turn of the second has twice the work."""

    def unfinished(x):
        return x[0, 0] < adapter[0, 0, 0]

    x = lax.while_loop(unfinished, lambda x: jnp.sin(dense(x, w[0])), x)
    x = lax.while_loop(unfinished, lambda x: jnp.sin(dense(dense(x, w[1]), w[2])), x)
    return x.sum()[None, None]


def branches(x, w, adapter):
    """A conditional: one gather, or two, or none."""
    which = adapter[0, 0, 0].astype(jnp.int32)
    ways = (
        lambda x: dense(x, w[0]),
        lambda x: jnp.sin(dense(jnp.sin(dense(x, w[1])), w[2])),
        lambda x: x,
    )
    return lax.switch(which, ways, x).sum()[None, None]


def main() -> None:
    x, w, adapter = arguments()
    programs = {
        "gradient": jax.jit(jax.grad(loss)).lower(adapter, x, w),
        **{
            fn.__name__: jax.jit(on_devices(fn)).lower(x, w, adapter)
            for fn in (layers, decode, two_loops, branches)
        },
    }
    print(json.dumps({name: lowered.compile().as_text() for name, lowered in programs.items()}))


if __name__ == "__main__":
    main()
