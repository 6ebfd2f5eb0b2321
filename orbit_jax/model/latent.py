"""Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form.

Keys and values of all heads are linear in one latent a token, which is all that is cached, with
one rotated key behind it. The map from latents to keys is applied to the queries instead, that from
latents to values to what was attended, so attention sees a single kv head. Sampler and trainer both
do it this way: the expanded form has other bits.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from orbit_jax.model.layers import Module
from orbit_jax.model.rope import rotate
from orbit_jax.quant.matmul import matmul_heads, swap_leading
from orbit_jax.quant.qtensor import round_to

_EPS = 1e-6  # of the norms of latents, whatever the model's own


def queries_and_latents(
    module: Module, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """`x[N, D]` to `q[N, H, kv_rank + rope]` and what is cached, `[N, 1, kv_rank + rope]`.

    Of the heads, a device of a mesh makes its own.
    """
    config, latent, n = module.config, module.config.latent, x.shape[0]
    if latent.q_rank:
        low = module.norm("q_a_layernorm", module.project("q_a_proj", x), x.dtype, _EPS)
        q = module.project("q_b_proj", low, gather=False)
    else:
        q = module.project("q_proj", x, gather=False)
    q = q.reshape(n, -1, latent.nope + latent.rope)
    q_plain, q_turned = jnp.split(q, [latent.nope], axis=-1)
    kv = module.project("kv_a_proj_with_mqa", x, gather=False)  # each device has all of it
    low, k_turned = jnp.split(kv, [latent.kv_rank], axis=-1)
    low = module.norm("kv_a_layernorm", low, x.dtype, _EPS)

    def turn(y: jax.Array) -> jax.Array:
        return round_to(rotate(config.rope, y.astype(jnp.float32), cos, sin), x.dtype)

    absorbed = _through_kv_b(module, q_plain, (0, latent.nope), transposed=True)
    q = jnp.concatenate([absorbed, turn(q_turned)], axis=-1)
    k = jnp.concatenate([low[:, None], turn(k_turned[:, None])], axis=-1)
    return q, k, None


def values(module: Module, attended: jax.Array) -> jax.Array:
    """Attended latents `[N, H, kv_rank + rope]` of own heads to their values `[N, H * value]`."""
    latent, n = module.config.latent, attended.shape[0]
    low = attended[..., : latent.kv_rank]
    rows = latent.nope, latent.nope + latent.value
    return _through_kv_b(module, low, rows, transposed=False).reshape(n, -1)


def _through_kv_b(
    module: Module, x: jax.Array, rows: tuple[int, int], *, transposed: bool
) -> jax.Array:
    """`x[N, H, in]` through each head's rows of `kv_b_proj`, with what is attached to it."""
    attached = module.adapter.below("kv_b_proj") if module.adapter else None
    weight, index = module.weights["kv_b_proj"], (module.layer,)
    if attached is None:
        return round_to(matmul_heads(x, weight, index, rows, transposed=transposed), x.dtype)
    method, params = attached.method_at(), attached.cast(x.dtype).params
    if not hasattr(method, "output_side_transposed"):
        raise ValueError(
            f"adapter.targets: kv_b_proj cannot be adapted by {type(method).__name__}, its "
            "transpose is needed: leave it out"
        )
    n, heads = x.shape[:2]
    # Heads read one input each, with the same parameters: they are rows like others.
    read = x if transposed else method.input_side(params, x.reshape(n * heads, -1)).reshape(x.shape)
    y = matmul_heads(read, weight, index, rows, transposed=transposed)
    apply = method.output_side_transposed if transposed else method.output_side
    follows = {  # whether a parameter has a part for each row of the weight
        name: "out" in spec
        for name, spec in method.partition(PartitionSpec("out", None)).items()
        if name in params
    }
    if not any(follows.values()):
        y = apply(params, x.reshape(n * heads, -1), y.reshape(n * heads, -1)).reshape(y.shape)
        return round_to(y, x.dtype)
    own = {
        name: p.reshape(heads, -1, *p.shape[1:])[:, rows[0] : rows[1]] if follows[name] else p
        for name, p in params.items()
    }
    axes = {name: 0 if follows[name] else None for name in own}
    y = jax.vmap(apply, (axes, 0, 0))(own, swap_leading(x), swap_leading(y))
    return round_to(swap_leading(y), x.dtype)
