"""PPO on products of three numbers with a tool that multiplies two, on the tiny agent base.

Commands:
  python experiments/ppo_tools.py --config configs/tiny_tools.py
  python experiments/ppo_tools.py --config configs/tiny_tools.py:mixed
  python experiments/ppo_code.py
Variants:
  code    small programs, executed in the sandbox
  mixed   sums, products and programs in equal parts, with metrics of each
  test    few and small rollouts
"""

import importlib.util
from pathlib import Path

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    """The recipe: what differs from `tiny_moe.py`."""
    path = Path(__file__).with_name("tiny_moe.py")
    spec = importlib.util.spec_from_file_location("tiny_moe", path)
    tiny_moe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_moe)
    config = tiny_moe.get_config("test" if variant == "test" else "")
    config.experiment = "ppo_tools"
    config.base.path = "orbit_jax/assets/tiny_agent_int4"
    config.task.mixture = ("products",)
    config.task.heldout_problems = 200
    config.tools.max_turns = 4
    config.sampler.max_prompt_tokens = 32
    config.sampler.max_completion_tokens = 128
    config.steps = 40
    if variant == "code":
        config.experiment = "ppo_code"
        config.task.mixture = ("functions",)
        config.sampler.max_completion_tokens = 32
    elif variant == "mixed":
        config.task.mixture = ("sums", "products", "functions")
        config.task.heldout_problems = 100
    elif variant == "test":
        config.steps = 2
        config.task.mixture = ("sums", "products")
        config.task.heldout_problems = 4
    elif variant:
        raise ValueError(f"tiny_tools has no variant {variant!r}: use code, mixed or test")
    return config
