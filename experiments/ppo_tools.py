"""PPO on tasks of several turns: tools are called, programs executed, and every token is exact.

    python experiments/ppo_tools.py --config configs/tiny_tools.py
    python experiments/ppo_tools.py --config configs/tiny_tools.py:mixed
    python experiments/ppo_tools.py --config.task.mixture="('my_task.py:MyTask',)"

Made to be copied, as `ppo_math.py` is. A rollout pauses where the model calls a tool; the output is
appended behind the very ids that were sampled, and sampling goes on from the cache. Nothing that
was given is trained on.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from orbit_jax import parity, startup
from orbit_jax.config import Config, to_dict
from orbit_jax.plan import traffic
from orbit_jax.rl import advantages, losses
from orbit_jax.rl.batch import make_batch, token_buckets
from orbit_jax.rl.rollouts import Rollouts, generate
from orbit_jax.rl.sampler import STOP_REASONS
from orbit_jax.runs.cli import main
from orbit_jax.runs.interrupt import StopFlag
from orbit_jax.runs.loading import Loading
from orbit_jax.runs.record import Recorder
from orbit_jax.tasks.chats import chat_of
from orbit_jax.tasks.data import content_hash
from orbit_jax.tasks.dialogues import Asked, Dialogues
from orbit_jax.tasks.registry import open_tasks
from orbit_jax.tasks.task import Example, Score, Transcript
from orbit_jax.tasks.tools import ToolPool

EVALUATION = 2**32 - 1  # stands in for the step, and keys evaluation's noise apart from training's


def run(
    config: Config,
    resume: str = "",
    loss_fn: losses.LossFn = losses.ppo_clip,
    advantage_fn: advantages.AdvantageFn | None = None,
) -> dict:
    """Trains by PPO and returns what `summary.json` holds."""
    startup.set_up_jax(config)
    with open_tasks(config) as (tasks, mixture):
        return train(config, tasks, mixture, resume, loss_fn, advantage_fn)


def train(config, tasks, mixture, resume, loss_fn, advantage_fn) -> dict:
    advantage_fn = advantage_fn or advantages.ADVANTAGES[config.ppo.advantage]
    sampler, tools = config.sampler, config.tools
    frozen = startup.load(config, Loading())
    tokenizer = frozen.tokenizer
    chats = {name: chat_of(tokenizer, task.tools, tools.syntax) for name, task in tasks.items()}
    heldout = [e for t in tasks.values() for e in t.examples("heldout")]
    every = [e for source in mixture.sources for e in source.examples] + heldout
    prompts = startup.encode_prompts(
        config, tokenizer, {f"{e.task}/{e.id}": tasks[e.task].messages(e) for e in every}
    )
    state, slots = startup.train_state(config, frozen), startup.slots(config, frozen)

    def rollouts(examples: Sequence[Example], group_size: int, temperature: float, step: int):
        """Rollouts of each example, what followed its prompt as texts, and counts of tools."""
        nonlocal slots
        rows = [
            Asked(e, tasks[e.task].messages(e), chats[e.task])
            for e in examples
            for _ in range(group_size)
        ]
        pool = ToolPool(tools.max_seconds, tools.workers)
        with Dialogues(rows, pool, tools.max_turns) as dialogues:
            out, slots = generate(
                programs.sample,
                programs.model,
                frozen.base,
                state.policy,
                slots,
                [prompts[f"{e.task}/{e.id}"] for e in examples],
                group_size=group_size,
                max_completion_tokens=sampler.max_completion_tokens,
                stop_ids=tokenizer.eos_ids,
                temperature=temperature,
                seed=config.seed,
                step=step,
                environment=dialogues,
            )
            texts = [
                dialogues.transcript(row, out.tokens[row, :length].tolist())
                for row, length in enumerate(out.lengths)
            ]
            return out, texts, dialogues.counts()

    def grade(examples: Sequence[Example], transcripts: Sequence[Transcript]) -> list[Score]:
        """What each transcript earns; examples are repeated for those of a group."""
        with ThreadPoolExecutor(tools.sandbox_workers) as threads:
            one = lambda example, transcript: tasks[example.task].grade(example, transcript)  # noqa: E731
            return list(threads.map(one, examples, transcripts))

    def evaluate(examples: Sequence[Example]) -> dict[str, float]:
        """Pass rates, greedy and at temperature 1, of all examples and of each task."""
        rates = {}
        for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            _, texts, _ = rollouts(examples, 1, temperature, EVALUATION)
            values = np.array([score.value for score in grade(examples, texts)])
            rates[f"heldout/pass_{how}"] = float(np.nanmean(values))
            rates |= by_task(examples, values, f"heldout_{{}}/pass_{how}")
        return rates

    facts = startup.facts(frozen, state)
    facts["data_hash"] = content_hash({"train": every, "heldout": heldout})
    with Recorder(to_dict(config), facts, resume) as record:
        state, start = record.restore(state)
        record.note(
            f"tasks: {', '.join(tasks)}; {len(every) - len(heldout):,} examples to train on"
        )
        record.note("compiling the sampler and the step, comparing their log-probs ...")
        programs, slots, report = parity.choose(
            config,
            frozen.model,
            frozen.base,
            state,
            slots,
            list(prompts.values())[: sampler.prompts_per_step],
            tokenizer.eos_ids,
            loss_fn,
            advantage_fn,
        )
        record.note(report.sentence)
        if not record.resumed:
            record.before(evaluate(heldout))

        with StopFlag() as stop:
            for step in record.timed(range(start, config.steps)):
                examples = mixture.examples_of_step(step, sampler.prompts_per_step, config.seed)
                sampled, texts, counts = rollouts(
                    examples, sampler.group_size, sampler.temperature, step
                )
                asked = [examples[group] for group in sampled.groups]
                scores = grade(asked, texts)
                rewards = np.array([score.value for score in scores], np.float32)
                batch = make_batch(
                    programs.model,
                    sampled,
                    rewards,
                    config.ppo.micro_batches,
                    token_buckets(config),
                )
                state, metrics = programs.ppo_step(
                    programs.step, frozen.base, state, batch, loss_fn, advantage_fn
                )
                metrics = jax.device_get(metrics) | counts | by_task(asked, rewards, "reward/{}")
                metrics |= {"tokens": sampled.lengths.sum()} | traffic.of_step(programs, sampled)
                record.check(step, state, metrics, batch, programs.recipe)
                done = step + 1
                if done % config.evaluation.every_steps == 0 and done < config.steps:
                    metrics |= evaluate(heldout[:: -(-len(heldout) // config.evaluation.problems)])
                outcomes = [score.outcome for score in scores]
                record.step(
                    step, metrics, rewards, outcomes, samples(sampled, asked, texts, scores)
                )
                if done % config.run.checkpoint_every_steps == 0 or done == config.steps:
                    record.checkpoint(done, state)
                if stop.requested:
                    return record.stopped(done, state)
        return record.after(evaluate(heldout))


def by_task(examples: Sequence[Example], values: np.ndarray, name: str) -> dict[str, float]:
    """The mean of each task's values, infra failures left out."""
    names = np.array([example.task for example in examples])
    found = {task: values[names == task] for task in dict.fromkeys(names)}
    return {
        name.format(task): float(np.nanmean(v))
        for task, v in found.items()
        if not np.isnan(v).all()
    }


def samples(
    sampled: Rollouts,
    asked: Sequence[Example],
    texts: Sequence[Transcript],
    scores: Sequence[Score],
) -> list[dict]:
    """One record a rollout, for `samples/`."""
    return [
        {
            "task": example.task,
            "problem": example.id,
            "prompt": example.prompt,
            "answer": example.answer,
            "turns": [[turn.role, turn.text] for turn in transcript],
            "reward": score.value,
            "outcome": score.outcome,
            **score.details,
            "stop": STOP_REASONS[sampled.status[i]],
            "prompt_ids": sampled.tokens[i, : sampled.prompt_lengths[i]].tolist(),
            "ids": sampled.completion(i),
            "sampled": sampled.sampled[i, sampled.prompt_lengths[i] : sampled.lengths[i]].tolist(),
            "logprobs": sampled.logprobs[i, sampled.sampled[i]].tolist(),
        }
        for i, (example, transcript, score) in enumerate(zip(asked, texts, scores, strict=True))
    ]


if __name__ == "__main__":
    main(run, default_config="configs/tiny_tools.py")
