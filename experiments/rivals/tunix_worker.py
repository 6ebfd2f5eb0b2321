"""Tunix's GRPO learner with a Qwix LoRA as a contestant; `worker.py` says what is spoken.

The learner's own loop runs; its data set waits for a request before it gives the next batch.
Tunix reads neither this base nor its precision: the model is Tunix's Llama of the same shape with
random weights, which take the same time. Its sampler cannot be told a length for each row, so there
are no varied cases.

Settings of its own: `dtype` (float32, or bfloat16), `micro_batches` (4: gradient accumulation).
"""

import importlib.metadata
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import reshard, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout.base_rollout import RolloutConfig
from worker import Channel, Meter, counted

LINEAR = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class Ids:
    """A tokenizer that knows the prompts of this run; its end and padding are never sampled."""

    def __init__(self, settings: dict):
        self.ids = dict(zip(settings["prompts"], settings["prompt_ids"], strict=True))
        self.outside = settings["shape"]["vocab_size"]

    def encode(self, text: str, **_) -> list[int]:
        """The ids of a prompt."""
        return self.ids[text]

    def decode(self, ids: list[int], **_) -> str:
        """Some text."""
        return str(len(ids))

    def bos_id(self) -> int:
        """None is put before a prompt."""
        return 0

    def eos_id(self) -> int:
        """An id that the model does not have."""
        return self.outside

    pad_id = eos_id


def build_model(settings: dict, mesh: jax.sharding.Mesh) -> nnx.Module:
    """A Llama of the base's shape with an adapter on all linear layers, on the mesh."""
    shape, dtype = settings["shape"], jnp.dtype(settings.get("dtype", "float32"))
    config = llama.ModelConfig(
        num_layers=shape["num_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_kv_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=shape["rms_norm_eps"],
        weight_tying=shape["tie_word_embeddings"],
    )
    graph, weights = nnx.split(llama.Llama3(config, rngs=nnx.Rngs(settings["seed"])))
    model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), weights))
    lora = qwix.LoraProvider(
        module_path=LINEAR, rank=settings["rank"], alpha=float(settings["alpha"])
    )
    rngs = nnx.Rngs(settings["seed"])
    model = qwix.apply_lora_to_model(model, lora, rngs=rngs, **model.get_model_input())
    return reshard.reshard_model_to_mesh(model, mesh)


def main() -> None:
    """Loads, then trains as long as steps are asked for."""
    channel = Channel()
    requests = iter(channel)
    settings = next(requests)
    prompts, samples = settings["prompts"], settings["group_size"]
    longest = max(map(len, settings["prompt_ids"]))
    mesh = jax.sharding.Mesh([[jax.devices()[0]]], ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=build_model(settings, mesh),
        tokenizer=Ids(settings),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in rl_cluster.Role},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5),
                eval_every_n_steps=1_000_000,
                max_steps=1_000_000,
                mini_batch_size=len(prompts),
                train_micro_batch_size=len(prompts) // settings.get("micro_batches", 4),
                rollout_micro_batch_size=len(prompts),
                compute_logps_micro_batch_size=len(prompts),
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=settings["new_tokens"],
                max_prompt_length=longest,
                kv_cache_size=longest + settings["new_tokens"],
                temperature=1.0,
            ),
        ),
    )

    def batches() -> Iterator[dict]:
        """Samples as often as asked, and gives a batch for each step that is."""
        for request in requests:
            meter = Meter()
            if request["case"] == "step":
                yield {"prompts": prompts}
                jax.block_until_ready(nnx.state(cluster.actor_trainer.model, nnx.LoRAParam))
                lengths = [settings["new_tokens"]] * len(prompts) * samples
            else:
                repeated = [prompt for prompt in prompts for _ in range(samples)]
                drawn = cluster.generate(prompts=repeated)
                lengths = [len(ids) for ids in drawn.tokens]
            tokens = counted(settings, request["case"], lengths)
            channel.send(meter.stop() | {"tokens": tokens})
        sys.exit()

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=samples, beta=0.0),
        reward_fns=lambda prompts, completions, **_: [i % 2 for i in range(len(completions))],
    )
    trained = nnx.state(cluster.actor_trainer.model, nnx.LoRAParam)
    adapter = sum(p.size for p in jax.tree.leaves(trained))
    facts = {
        "weights": "random, of the base's shape",
        "dtype": settings.get("dtype", "float32"),
        "adapter_parameters": int(adapter),
        "tunix": importlib.metadata.version("google-tunix"),
        "jax": jax.__version__,
    }
    channel.send({"cases": ["sample", "step"], "facts": facts})
    learner.train(batches())


if __name__ == "__main__":
    main()
