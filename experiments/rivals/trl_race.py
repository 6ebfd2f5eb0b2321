"""TRL's side of `experiments/race.py`: GRPOTrainer with a PEFT LoRA on the dequantised base.

Settings are TRL's defaults but for what the task fixes (adapter, learning rate, sizes), f32 as CPUs
want it, and what makes it faster here: no recomputation, all rollouts in one micro-batch.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import datasets
import peft
import torch
import transformers
import trl
from hf_worker import load_base
from worker import Channel

sys.path.append(str(Path(__file__).parents[2]))
from orbit_jax.tasks.grading import grade


class Turns(transformers.TrainerCallback):
    """Each step is asked for; asked to stop, the trainer does."""

    def __init__(self, requests: Iterator[dict]):
        self.requests = requests

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_,
    ) -> None:
        """Waits for what to do next."""
        control.should_training_stop = next(self.requests)["stop"]


def main() -> None:
    """Trains until told to stop, then answers every problem greedily."""
    channel = Channel()
    requests = iter(channel)
    told = next(requests)
    model, tokenizer = load_base(told)

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        rewards = [grade(c, a).value for c, a in zip(completions, answer, strict=True)]
        channel.send({"reward": sum(rewards) / len(rewards)})
        return rewards

    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict(
            {"prompt": told["prompts"], "answer": told["answers"]}
        ),
        peft_config=peft.LoraConfig(
            r=told["rank"],
            lora_alpha=told["alpha"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[Turns(requests)],
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=told["prompts_per_step"] * told["group_size"],
            num_generations=told["group_size"],
            max_completion_length=told["new_tokens"],
            gradient_checkpointing=False,
            learning_rate=told["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=100_000,
            logging_steps=100_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=told["seed"],
        ),
    )
    channel.send({"recipe": "f32"})
    next(requests)
    trainer.train()
    prompts = torch.tensor(told["prompt_ids"])
    with torch.no_grad():
        ids = trainer.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=told["new_tokens"],
            pad_token_id=tokenizer.eos_token_id,
        )
    texts = tokenizer.batch_decode(ids[:, prompts.shape[1] :], skip_special_tokens=True)
    rewards = [grade(t, a).value for t, a in zip(texts, told["answers"], strict=True)]
    channel.send({"greedy": sum(rewards) / len(rewards)})


if __name__ == "__main__":
    main()
