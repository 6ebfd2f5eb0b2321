"""Remakes `advantages.json`: advantages, returns and estimators of KL by verl.

Development only: `make goldens` (written with verl 0.9.1, torch 2.13.0). The functions of its
`core_algos.py` run here; its package, which wants a cluster, is not imported. verl whitens by the
spread of a sample, with n - 1.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

FILE = Path(__file__).parent / "advantages.json"
GAMMA, LAM = 0.9, 0.8
# [B, T]: rows of three prompts; a row pauses where a tool speaks.
MASK = [
    [1, 1, 1, 0, 0, 0],
    [1, 0, 0, 1, 1, 1],
    [1, 1, 1, 1, 1, 1],
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 1, 1, 1, 0, 0],
    [1, 1, 0, 0, 0, 0],
]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, -1.0, 0.75]


def core_algos() -> types.ModuleType:
    """verl's module with as little of its package as it reads."""
    root = Path(importlib.util.find_spec("verl").origin).parent
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    absent = ("omegaconf", "tensordict")  # of its requirements; only types are read of them
    for name in ("verl.trainer.config", "verl.workers", "verl.workers.config", *absent):
        sys.modules[name] = MagicMock()
    groupwise = importlib.import_module("verl.utils.groupwise")
    for name in ("as_torch_index", "group_mean_std"):
        setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
    return importlib.import_module("verl.trainer.ppo.core_algos")


def draw(seed: int) -> np.ndarray:
    """[B, T], rounded so that JSON holds it exactly."""
    drawn = np.random.default_rng(seed).normal(0, 0.5, np.shape(MASK))
    return (np.round(drawn * 256) / 256).astype(np.float32)


def main() -> None:
    verl = core_algos()
    mask = torch.tensor(MASK, dtype=torch.float32)
    rewards = torch.zeros_like(mask)
    for row, reward in enumerate(REWARDS):
        rewards[row, np.flatnonzero(MASK[row])[-1]] = reward
    grouped = {"response_mask": mask, "index": np.array(GROUPS)}
    discounted = types.SimpleNamespace(gamma=GAMMA)
    values = torch.tensor(draw(0)) * mask

    def grpo(by_std: bool) -> tuple:
        return verl.compute_grpo_outcome_advantage(
            rewards.clone(), epsilon=0.0, norm_adv_by_std_in_grpo=by_std, **grouped
        )

    found = {
        "grpo": grpo(True),
        "dr_grpo": grpo(False),
        "rloo": verl.compute_rloo_outcome_advantage(rewards.clone(), **grouped),
        "reinforce_pp_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), **grouped
        ),
        "reinforce_pp": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask, discounted
        ),
        "gae": verl.compute_gae_advantage_return(rewards.clone(), values, mask, GAMMA, LAM),
    }
    logprobs, reference = torch.tensor(draw(1)), torch.tensor(draw(2))
    names = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
    kl = {ours: verl.kl_penalty_forward(logprobs, reference, its) for ours, its in names.items()}
    goldens = {
        "mask": MASK,
        "groups": GROUPS,
        "rewards": REWARDS,
        "gamma": GAMMA,
        "lam": LAM,
        "values": values.tolist(),
        "logprobs": logprobs.tolist(),
        "reference": reference.tolist(),
        "advantages": {name: (a * mask).tolist() for name, (a, _) in found.items()},
        "returns": (found["gae"][1] * mask).tolist(),
        "kl": {name: value.tolist() for name, value in kl.items()},
    }
    FILE.write_text(json.dumps(goldens) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
