"""TRL's GRPOTrainer with a PEFT LoRA as a contestant; `worker.py` says what is spoken.

The trainer's own loop runs; this script only waits for a request before each optimiser step, and
forces each row's length (no end-of-text token before it, then nothing else). `sample` calls the
trainer's own generation.

Settings of its own: `dtype` (float32, or bfloat16), `micro_batches` (4: gradient accumulation) and
`gradient_checkpointing` (False: faster, more memory).
"""

import sys
import tempfile

import datasets
import peft
import torch
import transformers
import trl
from hf_worker import ForcedLengths, load_base
from worker import CASES, Channel, Meter, counted, lengths_of


class Waiting(transformers.TrainerCallback):
    """Answers requests between optimiser steps; each step is a request for one."""

    def __init__(self, settings: dict, channel: Channel):
        self.settings, self.requests, self.channel = settings, iter(channel), channel
        self.lengths: list[int] = []
        self.trainer: trl.GRPOTrainer | None = None

    def force_lengths(self, generate):
        """The model's own `generate`, with the lengths of the case at hand."""

        def forced(*arguments, **keywords):
            prompts = keywords["input_ids"].shape[1]
            keywords["generation_config"].max_new_tokens = max(self.lengths)
            rule = ForcedLengths(prompts, self.lengths, self.trainer.eos_token_ids)
            return generate(
                *arguments,
                **keywords,
                logits_processor=transformers.LogitsProcessorList([rule]),
            )

        return forced

    def on_step_begin(self, *_, **__) -> None:
        """Samples as often as asked, and returns to let a step happen."""
        for request in self.requests:
            self.case = request["case"]
            self.lengths = lengths_of(self.settings, self.case)
            self.meter = Meter()
            if self.case.startswith("step"):
                return
            samples = self.settings["group_size"]
            prompts = [ids for ids in self.settings["prompt_ids"] for _ in range(samples)]
            drawn, _ = self.trainer._generate_single_turn(prompts, None, {}, samples)
            self.answer([len(ids) for ids in drawn])
        sys.exit()

    def on_step_end(self, *_, **__) -> None:
        """The step is done."""
        parts = self.trainer._buffered_inputs
        self.answer([n for part in parts for n in part["completion_mask"].sum(1).tolist()])

    def answer(self, drawn: list[int]) -> None:
        """Sends what the case took."""
        took = self.meter.stop()
        self.channel.send(took | {"tokens": counted(self.settings, self.case, drawn)})


def reward(completions: list[str], **_) -> list[float]:
    """Something that differs within a group."""
    return [float(i % 2) for i in range(len(completions))]


def main() -> None:
    """Loads, then trains as long as steps are asked for."""
    channel = Channel()
    settings = next(iter(channel))
    model, tokenizer = load_base(settings)
    rows = len(settings["prompts"]) * settings["group_size"]
    micro_batches = settings.get("micro_batches", 4)
    waiting = Waiting(settings, channel)
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": settings["prompts"] * 100}),
        peft_config=peft.LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[waiting],
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=not torch.cuda.is_available(),
            bf16=False,  # autocasting; the base's own type is set above
            per_device_train_batch_size=rows // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_generations=settings["group_size"],
            max_completion_length=max(lengths_of(settings, "step_varied")),
            gradient_checkpointing=settings.get("gradient_checkpointing", False),
            shuffle_dataset=False,
            learning_rate=1e-5,
            max_steps=1_000_000,
            logging_steps=1_000_000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    waiting.trainer = trainer
    trainer.model.generate = waiting.force_lengths(trainer.model.generate)
    versions = {m.__name__: m.__version__ for m in (trl, peft, transformers, torch)}
    adapter = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    facts = {"dtype": str(model.dtype), "adapter_parameters": adapter, **versions}
    channel.send({"cases": CASES, "facts": facts})
    trainer.train()


if __name__ == "__main__":
    main()
