"""PPO on tasks of several turns: tools are called, and every token of every turn is exact.

    python experiments/ppo_tools.py
    python experiments/ppo_tools.py --config configs/tiny_tools.py:mixed
    python experiments/ppo_tools.py --config.task.mixture="('my_task.py:MyTask',)"

The loop is that of `ppo_math.py`; only the tasks are others.
"""

from ppo_math import run

from orbit_jax.runs.cli import main

if __name__ == "__main__":
    main(run, default_config="configs/tiny_tools.py")
