"""The command line of an experiment: `--config file.py[:variant]`, overrides, `--resume`, `--help`.

A mistake in what was typed ends in one sentence and exit status 2, not in a traceback.
"""

import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags

from orbit_jax.config import Config, from_config_dict


def main(run: Callable[[Config, str], object], default_config: str) -> None:
    """Parses the command line and calls `run(config, resume)`.

    Args:
      run: the experiment. A ValueError from it is a refusal: its sentence is what the user sees.
      default_config: used when `--config` is not given.
    """
    recipe = config_flags.DEFINE_config_file(
        "config", default_config, "the recipe; override a field as --config.adapter.rank=8"
    )
    resume = flags.DEFINE_string("resume", "", "a run folder to go on with")
    for name in ("config", "resume"):  # so that --help shows them as the experiment's own
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def call(_: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # orbax tells of every file it touches
        try:
            run(from_config_dict(recipe.value), resume.value)
        except ValueError as error:
            _refuse(error)

    app.run(call, flags_parser=_parse)


def _parse(arguments: list[str]) -> list[str]:
    """absl's parsing; ml_collections raises a KeyError for a field that does not exist."""
    try:
        return flags.FLAGS(arguments)
    except (KeyError, AttributeError, ValueError, FileNotFoundError, flags.Error) as error:
        _refuse(error)


def _refuse(error: Exception) -> None:
    lines = str(error.args[0] if error.args else error).strip().splitlines()
    print(f"error: {lines[-1]}", file=sys.stderr)  # config_flags tells a story first
    sys.exit(2)
