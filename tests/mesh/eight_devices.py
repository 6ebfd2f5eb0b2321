"""Models on one and on eight simulated devices, in a process of its own (see `conftest.py`).

Prints one JSON object of figures; `test_mesh.py` says what they must be.
"""

import dataclasses
import functools
import json

import jax

from orbit_jax import processes

processes.simulate_devices(8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import toy  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from orbit_jax import mesh, parity  # noqa: E402
from orbit_jax.adapters.adapter import LINEAR_LAYERS, Method, attach  # noqa: E402
from orbit_jax.adapters.lora import LoRA  # noqa: E402
from orbit_jax.adapters.oft import OFT  # noqa: E402
from orbit_jax.config import Config, MeshConfig, PPOConfig, SamplerConfig  # noqa: E402
from orbit_jax.model.config import MeshShape, ModelConfig  # noqa: E402
from orbit_jax.plan import traffic  # noqa: E402
from orbit_jax.quant.qtensor import QTensor  # noqa: E402
from orbit_jax.rl import sampler, train_state  # noqa: E402
from orbit_jax.rl.advantages import grpo  # noqa: E402
from orbit_jax.rl.batch import make_batch, token_buckets  # noqa: E402
from orbit_jax.rl.losses import ppo_clip  # noqa: E402
from orbit_jax.rl.rollouts import generate  # noqa: E402
from orbit_jax.rl.train_state import init_state  # noqa: E402

# Two kv heads do not divide over four devices and are replicated there; four do.
MODELS = {
    "moe": toy.MOE,
    "rotated": toy.LATENT,
    "dense": dataclasses.replace(toy.DENSE, num_heads=8, num_kv_heads=4, head_dim=16),
    "latent": toy.LATENT,
    "sinks": dataclasses.replace(
        toy.SINKS, num_heads=8, num_kv_heads=4, head_dim=16, qk_norm="all"
    ),
}
NUM_ROWS, NUM_SLOTS = 8, 64
PROMPTS = [0, 9, 30, 1, 5, 17, 2, 40]


@functools.cache
def rows(name: str) -> toy.Rows:
    return toy.Rows.draw(MODELS[name], NUM_ROWS, NUM_SLOTS)


def on(name: str, data: int = 1, tensor: int = 1) -> ModelConfig:
    config = dataclasses.replace(MODELS[name], mesh=MeshShape(data, tensor))
    mesh.validate(config)
    return config


@functools.cache
def placed(config: ModelConfig, name: str) -> tuple:
    base = toy.make_base(MODELS[name])
    targets = ("q_proj", "o_proj", "down_proj")
    if MODELS[name].latent:
        targets = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj")
    adapter = toy.make_adapter(base, OFT(8) if name == "rotated" else None, targets)
    base = mesh.place(config, base, mesh.base_specs(base))
    return base, mesh.place(config, adapter, mesh.adapter_specs(adapter))


def arguments(config: ModelConfig, name: str) -> tuple:
    """Base, adapter, stream and temperature on the mesh, and what the stream's tokens stand for.

    The stream is the same for every mesh: eight parts, so that it can be cut for any of them.
    """
    stream, origin = rows(name).stream(size=NUM_ROWS * NUM_SLOTS, shards=8)
    stream, temperature = mesh.place_rows(config, (stream, rows(name).temperature(origin)))
    return *placed(config, name), stream, temperature, origin


@functools.cache
def full(name: str, data: int = 1, tensor: int = 1) -> np.ndarray:
    config = on(name, data, tensor)
    *args, origin = arguments(config, name)
    return toy.table(rows(name), origin, toy.training_forward(config)(*args))


@functools.cache
def gradient(name: str, data: int = 1, tensor: int = 1) -> tuple[np.ndarray, list[np.ndarray]]:
    config = on(name, data, tensor)
    *args, origin = arguments(config, name)
    logprobs, grads = toy.training_gradient(dataclasses.replace(config, remat=True))(*args)
    return toy.table(rows(name), origin, logprobs), jax.tree.leaves(jax.device_get(grads))


def decoded(name: str, data: int, tensor: int) -> np.ndarray:
    config = on(name, data, tensor)
    return toy.cached_table(config, *placed(config, name), rows(name), PROMPTS)


def decoded_from_a_working_copy(name: str, data: int, tensor: int) -> np.ndarray:
    config = on(name, data, tensor)
    base, adapter = placed(config, name)
    base = toy.with_working_copy(base)  # as a run makes it: of the base on the mesh
    for leaf, spec in zip(
        jax.tree.leaves(base), jax.tree.leaves(mesh.base_specs(base)), strict=True
    ):
        wanted = NamedSharding(mesh.build(config.mesh), spec)
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (leaf.shape, leaf.sharding, spec)
    return toy.cached_table(config, base, adapter, rows(name), PROMPTS)


def worst_gradient_error() -> float:
    """Largest error of any adapter weight's gradient, relative to the largest entry of it."""
    pairs = zip(gradient("moe")[1], gradient("moe", 2, 4)[1], strict=True)
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def steps(
    data: int, tensor: int, micro_batches: tuple[int, ...], method: Method
) -> dict[str, list]:
    """Of one set of rollouts, trained on once by each number of micro-batches.

    The gap between the real sampler and the real step, the loss, the gradient's norm, how many
    arrays of the state come back lying otherwise, how many programs sampler and step need too many
    when they go on from there, and what they send; turns of decoding and the longest completion.
    """
    model = on("moe", data, tensor)
    sampling = SamplerConfig(prompts_per_step=8, group_size=4)
    config = Config(sampler=sampling, mesh=MeshConfig(data, tensor))
    base, _ = placed(model, "moe")
    policy = attach(method, jax.random.key(0), base, LINEAR_LAYERS)
    state = init_state(config.optimizer, policy, None)
    state = mesh.place(model, state, train_state.state_specs(model, state))
    state = parity.perturbed(state, seed=0)
    slots = sampler.empty_state(model, config.rows, config.num_slots, 1)
    slots = mesh.place(model, slots, sampler.state_specs(model, slots))
    programs = parity.build("fast", model, config)

    def sampled(policy, slots):
        return generate(
            programs.sample,
            programs.model,
            base,
            policy,
            slots,
            [list(range(1, 2 + n)) for n in range(8)],
            group_size=4,
            max_completion_tokens=config.sampler.max_completion_tokens,
            stop_ids=(0,),
            temperature=1.0,
            seed=0,
            step=0,
        )

    rollouts, slots = sampled(state.policy, slots)
    rewards = rollouts.tokens.sum(axis=1) % 3
    found = {"gap": [], "loss": [], "gradient": [], "resharded": [], "sent": []}
    found["turns"] = [rollouts.decode_steps, int(rollouts.completion_lengths.max())]
    for count in micro_batches:
        changed = dataclasses.replace(config, ppo=PPOConfig(micro_batches=count))
        batch = make_batch(model, rollouts, rewards, count, token_buckets(changed)[-1:])
        step = functools.partial(programs.ppo_step, programs.step, base)
        copy = jax.tree.map(jnp.copy, state)
        after, metrics = step(copy, batch, ppo_clip, grpo)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
        moved = sum(not a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
        found["gap"].append(float(metrics["parity/max_abs_diff"]))
        found["loss"].append(float(metrics["loss/policy"]))
        found["gradient"].append(float(metrics["gradient_norm/policy"]))
        _, slots = sampled(after.policy, slots)
        step(after, batch, ppo_clip, grpo)
        compiled = programs.sample.executables + programs.ppo_step.executables
        found["resharded"].append(moved + compiled - 1 - len(found["gap"]))
        found["sent"].append(traffic.of_step(programs, rollouts))
    return found


def shares() -> dict[str, float]:
    """The largest part of a kind of weight's bytes that one of 2x4 devices holds."""
    base, adapter = placed(on("moe", 2, 4), "moe")
    layer, trained = base["layers"][0], adapter.params["layers"][0]

    def share(tree) -> float:
        held = np.zeros(8)
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            for shard in leaf.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
        return float(held.max() / sum(leaf.nbytes for leaf in leaves))

    attention = {k: q for k, q in layer["self_attn"].items() if isinstance(q, QTensor)}
    return {
        "experts": share(layer["mlp"]["experts"]),
        "expert adapters": share(trained["mlp"]["experts"]),
        "attention": share(attention),
        "router": share(layer["mlp"]["gate"]),
    }


def main() -> None:
    one, figures = full("moe"), {}
    for data, tensor in ((8, 1), (1, 8)):
        figures[f"moe {data}x{tensor}"] = toy.largest_gap(one, full("moe", data, tensor))
    # With remat, as the tests of one device have none.
    figures["moe 1x1 under a gradient"] = toy.largest_gap(one, gradient("moe")[0])
    figures["moe 2x4 under a gradient"] = toy.largest_gap(one, gradient("moe", 2, 4)[0])
    figures["moe 2x4 decoded"] = toy.largest_gap(one, decoded("moe", 2, 4))
    figures["dense 2x4"] = toy.largest_gap(full("dense"), full("dense", 2, 4))
    for name in ("dense", "latent", "sinks", "rotated"):
        figures[f"{name} 2x4 decoded"] = toy.largest_gap(full(name), decoded(name, 2, 4))
    for name in ("latent", "sinks", "rotated"):
        found = gradient(name, 2, 4)[0]
        figures[f"{name} 2x4 under a gradient"] = toy.largest_gap(full(name), found)
    copied = decoded_from_a_working_copy("moe", 2, 4)
    figures["moe 2x4 decoded from a working copy"] = toy.largest_gap(one, copied)
    lora, oft = LoRA(4, 8.0), OFT(8)
    figures["steps 8x1"] = steps(8, 1, (1,), lora)
    figures["steps 2x4"] = steps(2, 4, (1, 4), lora)
    figures["rotated steps 2x4"] = steps(2, 4, (1,), oft)
    figures["spread"] = float(np.nanstd(one))
    figures["gradient error"] = worst_gradient_error()
    figures["shares"] = shares()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
