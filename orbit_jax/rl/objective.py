"""What an update minimises: a micro-batch's share of the policy's loss, and of the critic's."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from orbit_jax.adapters.adapter import Adapter
from orbit_jax.config import OptimizerConfig, PPOConfig
from orbit_jax.model.config import ModelConfig
from orbit_jax.model.head import score
from orbit_jax.model.stream import Stream
from orbit_jax.model.transformer import apply
from orbit_jax.quant.matmul import dot
from orbit_jax.rl import kl
from orbit_jax.rl.losses import LossFn, Tokens, exp_ratio
from orbit_jax.rl.metrics import Sums
from orbit_jax.rl.train_state import Critic, TrainState


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What the step depends on. `exact` is false only under the `corrected` parity recipe.

    `max_completion_tokens` is the sampler's, for losses that are averaged over it.
    """

    model: ModelConfig
    ppo: PPOConfig
    optimizer: OptimizerConfig
    max_completion_tokens: int
    seed: int = 0
    exact: bool = True


def policy_loss(
    config: StepConfig,
    base: dict,
    state: TrainState,
    temperature: jax.Array,
    kl_coefficient: jax.Array,
    loss_fn: LossFn,
    params: dict,
    micro: dict,
) -> tuple[jax.Array, Sums]:
    """A micro-batch's share of the policy's loss: its tokens' losses, each with its weight."""
    ppo, mask, trained = config.ppo, micro["mask"], micro["trained"]
    policy = state.policy.replace(params=params)
    stream = micro["stream"]
    logprobs, entropy, load = forward(config, base, policy, stream, micro["scored"], temperature)
    # What stands in masked places, finite or not, must reach neither the loss nor a gradient.
    logprobs = jnp.where(mask, logprobs, 0.0)
    entropy = jnp.where(mask, entropy, 0.0)
    old, reference = micro["old"], micro["reference"]
    tokens = Tokens(logprobs, old, micro["advantages"], mask, stream.rows, stream.num_rows)
    result = loss_fn(ppo, tokens)
    if not isinstance(result, tuple):
        raise ValueError("loss_fn must return (loss of each token, metrics of each token by name)")
    token_loss, extra = result
    chex.assert_shape([token_loss, *extra.values()], mask.shape)  # a mean would weigh wrongly
    if ppo.kl == "loss":
        token_loss += kl_coefficient * kl.in_loss(ppo.kl_estimator, logprobs, reference)
    token_loss *= micro["importance"]
    if ppo.entropy_coefficient:
        token_loss -= ppo.entropy_coefficient * entropy
    total = jnp.where(trained, token_loss * micro["weights"], 0.0).sum()
    difference = logprobs - old
    ratio = exp_ratio(difference)
    sums = {
        "ratio/mean": ratio,
        "entropy": entropy,
        "kl/rollout_k1": kl.k1(old, logprobs),
        "kl/rollout_k3": kl.k3(old, logprobs),
        **extra,
    }
    if ppo.kl != "off":
        sums |= {
            "kl/reference_k1": kl.k1(logprobs, reference),
            "kl/reference_k3": kl.k3(logprobs, reference),
        }
    maxima = {"parity/max_abs_diff": jnp.abs(difference), "ratio/max": ratio}
    return total, Sums.of({"loss/policy": total}, sums, trained, load, maxima, mask)


def value_loss(
    config: StepConfig,
    base: dict,
    critic: Critic,
    params: dict,
    micro: dict,
) -> tuple[jax.Array, Sums]:
    """The same of the critic's loss, which is a mean over tokens however the policy's is."""
    ppo, trained = config.ppo, micro["trained"]
    critic = critic.replace(
        adapter=critic.adapter.replace(params=params["adapter"]), head=params["head"]
    )
    value, _ = values(config, base, critic, micro["stream"])
    error = jnp.square(value - micro["returns"])
    if ppo.value_clip:
        near = micro["values"] + jnp.clip(value - micro["values"], -ppo.value_clip, ppo.value_clip)
        error = jnp.maximum(error, jnp.square(near - micro["returns"]))
    loss = 0.5 * jnp.where(trained, error, 0.0)
    total = (loss * micro["value_weights"]).sum()
    sums = {"value/mean": value, "value/return": micro["returns"]}
    no_load = jnp.zeros((0, 0), jnp.int32)
    return ppo.value_coefficient * total, Sums.of({"loss/value": total}, sums, trained, no_load)


def forward(
    config: StepConfig,
    base: dict,
    adapter: Adapter | None,
    stream: Stream,
    scored: jax.Array | None,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs and entropies [N], standing at the tokens that they are of, and expert loads.

    They are 0 where not `scored` (see `Batch`; None scores all).
    """
    hidden, _, load = apply(config.model, base, adapter, stream)
    # Rows are contiguous: the target of a token is its right neighbour, and what was computed for
    # it moves right by one.
    targets = jnp.roll(stream.tokens, -1)
    logprobs, entropy = score(
        config.model,
        base,
        hidden,
        targets,
        jnp.broadcast_to(temperature, targets.shape),
        places=scored,
        entropy_gradient=config.ppo.entropy_coefficient > 0,
    )
    return jnp.roll(logprobs, 1), jnp.roll(entropy, 1), load


def values(
    config: StepConfig, base: dict, critic: Critic, stream: Stream
) -> tuple[jax.Array, jax.Array]:
    """The critic's value before each token and after it, both [N] f32."""
    hidden, _, _ = apply(config.model, base, critic.adapter, stream)
    after = dot(hidden, critic.head[None].astype(hidden.dtype))[:, 0]
    return jnp.roll(after, 1), after
