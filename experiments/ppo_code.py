"""PPO on small programs: completions are executed in the sandbox, against tests of their own.

    python experiments/ppo_code.py
    python experiments/ppo_code.py --config.seed=1

The loop is that of `ppo_math.py`; only the task is another.
"""

from ppo_math import run

from orbit_jax.runs.cli import main

if __name__ == "__main__":
    main(run, default_config="configs/tiny_tools.py:code")
