"""PPO on tasks that are graded: a frozen low-bit base, one adapter that trains, exact log-probs.

    python experiments/ppo_math.py --config configs/tiny_moe.py
    python experiments/ppo_math.py --config configs/tiny_moe.py:gae --config.seed=1
    python experiments/ppo_math.py --config configs/tiny_moe.py --resume runs/ppo_math-...
    python experiments/ppo_math.py --config.task.mixture="('2*sums', 'my_task.py:MyTask')"
    python experiments/ppo_math.py --config.ppo.loss=my_rl.py:my_loss

Made to be copied. `train` is the whole algorithm: sample, score, step; what a reader may want to
change is a field of the config, which may name code in a file (the loss, the advantage, the
adapter, the task), or a line here. A rollout may
take several turns: where the model calls a tool, or somebody answers it, what is given is appended
behind the very ids that were sampled, sampling goes on from the cache, and none of it is trained
on.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from orbit_jax import parity, processes, startup
from orbit_jax.config import Config, to_dict
from orbit_jax.plan import traffic
from orbit_jax.rl import advantages, dynamic, losses
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts, generate
from orbit_jax.rl.sampler import STOP_REASONS
from orbit_jax.runs import wandb_run
from orbit_jax.runs.cli import main
from orbit_jax.runs.interrupt import StopFlag
from orbit_jax.runs.loading import Loading
from orbit_jax.runs.record import Recorder
from orbit_jax.tasks import judging
from orbit_jax.tasks.dialogues import Dialogues
from orbit_jax.tasks.registry import Tasks, open_tasks
from orbit_jax.tasks.task import Example
from orbit_jax.tasks.tools import ToolPool

EVALUATION = 2**32 - 1  # stands in for the step, and keys evaluation's noise apart from training's


def run(config: Config, resume: str = "", change: Sequence[str] = ()) -> dict:
    """Trains by PPO and returns what `summary.json` holds.

    Args:
      resume: the folder of a run to go on with.
      change: fields of its config that are to differ from here on.
    """
    wandb_run.require_installed(config.run.wandb)
    startup.set_up_jax(config)
    with open_tasks(config) as tasks:
        return train(config, tasks, resume, change)


def train(config: Config, tasks: Tasks, resume: str, change: Sequence[str]) -> dict:
    """`run` with its tasks open."""
    sampler, ppo, tools = config.sampler, config.ppo, config.tools
    loss_fn, advantage_fn = losses.named(ppo.loss), advantages.named(ppo.advantage)
    splits = {name: tasks.split(name) for name in ("train", "heldout", "unseen")}
    frozen = startup.load(config, Loading())
    base, tokenizer = frozen.base, frozen.tokenizer
    asked = tasks.pose([e for examples in splits.values() for e in examples], tokenizer)
    startup.check_prompts(config, {key: one.prompt for key, one in asked.items()})
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)

    def rollouts(
        examples: Sequence[Example], group_size: int, temperature: float, step: int, first: int = 0
    ):
        """Rollouts of each example by the current policy, verdicts on them, counts of turns."""
        nonlocal slots
        rows = [asked[e.key] for e in examples for _ in range(group_size)]
        pool = ToolPool(tools.max_seconds, tools.workers)
        with Dialogues(rows, pool, tools.max_turns) as dialogues:
            out, slots = generate(
                programs.sample,
                programs.model,
                base,
                state.policy,
                slots,
                [asked[e.key].prompt for e in examples],
                group_size=group_size,
                max_completion_tokens=sampler.max_completion_tokens,
                stop_ids=tokenizer.eos_ids,
                temperature=temperature,
                seed=config.seed,
                step=step,
                prompt_ids=range(first, first + len(examples)),
                environment=dialogues,
            )
            verdicts = processes.by_first(tasks.judge, dialogues, out)
            return out, verdicts, processes.by_first(dialogues.counts)

    def draw(step: int, number: int) -> dynamic.Round:
        """Rollouts of a step's examples, scored; of further ones from the second round on."""
        count = sampler.prompts_per_step
        taken = dynamic.step_of_round(step, number)
        examples = tasks.mixture.examples_of_step(taken, count, config.seed)
        sampled, verdicts, counts = rollouts(
            examples, sampler.group_size, sampler.temperature, step, first=number * count
        )
        rewards = np.array([one["reward"] for one in verdicts], np.float32)
        return dynamic.Round(sampled, rewards, verdicts, counts)

    def evaluate(parts: Mapping[str, Sequence[Example]]) -> dict[str, float]:
        """Pass rates, greedy and at temperature 1, of each part of the data."""
        rates = {}
        for name, examples in parts.items():
            for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                _, verdicts, _ = rollouts(examples, 1, temperature, EVALUATION)
                rates |= judging.pass_rates(verdicts, name, how)
        return rates

    whole = {name: splits[name] for name in ("heldout", "unseen") if splits[name]}
    part = {"heldout": tasks.some("heldout", config.evaluation.problems)}
    hashes = {"data_hash": tasks.content_hash(), "code_hash": config.code_hash}
    facts = startup.facts(frozen, state) | hashes
    with Recorder(to_dict(config), facts, resume, change) as record:
        state, start = record.restore(state)
        for line in tasks.lines():
            record.note(line)
        record.note(startup.memory_sentence(config, frozen))
        record.note("compiling the sampler and the step, comparing their log-probs ...")
        programs, slots, report = parity.choose(
            config,
            frozen.model,
            base,
            state,
            slots,
            [asked[e.key].prompt for e in splits["train"][: sampler.prompts_per_step]],
            tokenizer.eos_ids,
            loss_fn,
            advantage_fn,
        )
        record.note(report.sentence)
        if not record.resumed:
            record.before(evaluate(whole))

        with StopFlag() as stop:
            for step in record.timed(range(start, config.steps)):
                save = functools.partial(record.checkpoint, step, state)
                sampled, rewards, verdicts, counts = dynamic.fill(
                    functools.partial(draw, step), ppo.dynamic_sampling, save
                )
                batch = make_batch(
                    programs.model, sampled, rewards, ppo.micro_batches, token_buckets(config)
                )
                state, metrics = programs.ppo_step(
                    programs.step, base, state, batch, loss_fn, advantage_fn
                )
                metrics = jax.device_get(metrics) | describe(sampled, rewards) | counts
                metrics |= judging.measures(verdicts) | traffic.of_step(programs, sampled)
                record.check(step, state, metrics, batch, programs.recipe)
                done = step + 1
                if done % config.evaluation.every_steps == 0 and done < config.steps:
                    metrics |= evaluate(part)
                outcomes = [one["outcome"] for one in verdicts]
                record.step(step, metrics, rewards, outcomes, samples(sampled, verdicts))
                record.save_if_due(done, state)
                if stop.requested:
                    return record.stopped(done, state)
        return record.after(evaluate(whole))


def describe(sampled: Rollouts, rewards: np.ndarray) -> dict[str, float]:
    """Metrics of the rollouts themselves."""
    by_group = rewards.reshape(-1, np.bincount(sampled.groups)[0])
    # Samples without a reward (NaN) are left out of their group.
    lowest, highest = np.fmin.reduce(by_group, axis=1), np.fmax.reduce(by_group, axis=1)
    stopped = {f"stop/{r}": np.mean(sampled.status == i) for i, r in enumerate(STOP_REASONS)}
    return {
        "tokens": sampled.lengths.sum(),
        "completion/length_mean": sampled.sampled.sum(axis=1).mean(),
        "reward/flat_groups": np.mean(~(highest > lowest)),
        **{name: share for name, share in stopped.items() if share},
    }


def samples(sampled: Rollouts, verdicts: Sequence[judging.Verdict]) -> list[dict]:
    """One record a rollout, for `samples/`."""
    return [
        {
            **verdict,
            "stop": sampled.stops[i],
            "adapter_fingerprint": sampled.fingerprint,
            "prompt_ids": sampled.tokens[i, : sampled.prompt_lengths[i]].tolist(),
            "ids": sampled.completion(i),
            "sampled": sampled.sampled[i, sampled.prompt_lengths[i] : sampled.lengths[i]].tolist(),
            "logprobs": sampled.logprobs[i, sampled.sampled[i]].tolist(),
        }
        for i, verdict in enumerate(verdicts)
    ]


if __name__ == "__main__":
    main(run, default_config="configs/tiny_moe.py")
