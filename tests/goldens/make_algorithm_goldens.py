"""Remakes `algorithms.json`: losses and their gradients by TRL.

Development only: `make goldens` (written with trl 1.16.0, torch 2.13.0). TRL's own
`GRPOTrainer._compute_loss` runs here, with a model that answers with the log-probs of this file.
Each case has `trl`, what TRL was told, the scalar `loss`, and `gradient` [B, T] by the log-probs.
"""

import collections
import json
import types
from pathlib import Path

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

FILE = Path(__file__).parent / "algorithms.json"
MAX_COMPLETION_TOKENS = 8
MASK = [[1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]
ADVANTAGES = [1.5, -0.5, 0.25, -1.25]

# Case: what TRL is told; `epsilon_high` of cispo is the largest weight itself.
CASES = {
    "ppo_clip token_mean": {"loss_type": "bnpo"},
    "ppo_clip sequence_mean": {"loss_type": "grpo"},
    "ppo_clip constant_length": {"loss_type": "dr_grpo"},
    "ppo_clip dual_clip": {"loss_type": "bnpo", "delta": 1.5},
    "ppo_clip kl_in_loss": {"loss_type": "bnpo", "beta": 0.3},
    "gspo sequence_mean": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
    },
    "cispo token_mean": {"loss_type": "cispo", "epsilon_high": 1.28},
}


def draw(seed: int) -> np.ndarray:
    """[B, T] log-probs, rounded so that JSON holds them exactly."""
    drawn = np.random.default_rng(seed).normal(-1.5, 0.4, np.shape(MASK))
    return (np.round(drawn * 256) / 256).astype(np.float32)


def loss_of(told: dict) -> tuple[float, list]:
    settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0} | told
    logprobs = torch.tensor(draw(0), requires_grad=True)
    one = types.SimpleNamespace
    accelerator = one(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    trainer = one(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, 0 * logprobs.detach(), None),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings["epsilon_low"],
        epsilon_high=settings["epsilon_high"],
        beta=settings["beta"],
        max_completion_length=MAX_COMPLETION_TOKENS,
        args=one(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        model=one(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
    )
    mask, ids = torch.tensor(MASK), torch.zeros(np.shape(MASK), dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": torch.tensor(draw(1)),
        "ref_per_token_logps": torch.tensor(draw(2)),
        "num_items_in_batch": mask.sum().float(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def main() -> None:
    cases = {}
    for name, told in CASES.items():
        loss, gradient = loss_of(told)
        cases[name] = {"trl": told, "loss": loss, "gradient": gradient}
    given = {"logprobs": draw(0), "old": draw(1), "reference": draw(2)}
    goldens = {
        **{name: values.tolist() for name, values in given.items()},
        "mask": MASK,
        "advantages": ADVANTAGES,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "cases": cases,
    }
    FILE.write_text(json.dumps(goldens, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
