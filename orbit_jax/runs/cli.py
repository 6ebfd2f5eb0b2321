"""An experiment's command line: `--config file.py[:variant]`, overrides, `--resume`, `--change`.

A mistake in what was typed, and whatever this package refuses, ends in one sentence and exit status
2; any other error keeps its traceback.
"""

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from orbit_jax.config import from_config_dict

_MISTAKES = (KeyError, AttributeError, ValueError, OSError, flags.Error)


def main(run: Callable[..., object], default_config: str, *, resumable: bool = True) -> None:
    """Parses the command line and calls `run(config, resume)`.

    Args:
      run: the experiment, called as `run(config, resume, change)`. What `orbit_jax` itself raises
        in it is a sentence for the user.
      default_config: used when `--config` is not given.
      resumable: whether there are `--resume` and `--change`; without them the call is
        `run(config)`.
    """
    try:  # defining the flag already applies overrides to the default config
        recipe = config_flags.DEFINE_config_file(
            "config", default_config, "the recipe; override a field as --config.adapter.rank=8"
        )
    except _MISTAKES as error:
        _refuse(error)
    own = ["config"]
    if resumable:
        resume = flags.DEFINE_string("resume", "", "a run folder to go on with")
        change = flags.DEFINE_list(
            "change", [], "fields that are to differ from those of the run that goes on"
        )
        own += ["resume", "change"]
    for name in own:  # so that --help shows them as the experiment's own
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def call(arguments: list[str]) -> None:
        if arguments[1:]:
            _refuse(
                ValueError(f"{arguments[1]!r} stands alone: is --{' or --'.join(own)} missing?")
            )
        logging.set_verbosity(logging.WARNING)  # orbax tells of every file it touches
        try:
            config = from_config_dict(recipe.value)
        except OSError:  # config_flags keeps a failure to read the file until the first use
            path = config_flags.get_config_filename(flags.FLAGS["config"])
            _refuse(ValueError(f"--config={path}: no such file; give one like {default_config}"))
        except ValueError as error:
            _refuse(error)
        try:
            run(config, *([resume.value, change.value] if resumable else []))
        except KeyboardInterrupt:
            print("stopped at once; a run that has saved goes on with --resume", file=sys.stderr)
            sys.exit(130)
        except jax.errors.JaxRuntimeError:
            if jax.process_count() == 1:
                raise
            traceback.print_exc()
            os._exit(1)  # else JAX waits at the exit for a process that is gone
        except (ValueError, RuntimeError) as error:
            if not _is_sentence(error):
                raise
            _refuse(error)

    app.run(call, flags_parser=_parse)


def _parse(arguments: list[str]) -> list[str]:
    """absl's parsing; ml_collections raises a KeyError for a field that does not exist."""
    try:
        return flags.FLAGS(arguments)
    except _MISTAKES as error:
        _refuse(error)
    except (SyntaxError, NameError) as error:
        _refuse(ValueError(f"--config: no recipe in Python, as configs/tiny_moe.py is ({error})"))


def _is_sentence(error: Exception) -> bool:
    """Whether a `raise` of this package made the error, not a call that went wrong inside it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    code = linecache.getline(frame.f_code.co_filename, line).lstrip()
    return frame.f_globals.get("__name__", "").startswith("orbit_jax.") and code.startswith("raise")


def _refuse(error: Exception) -> NoReturn:
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    lines = str(error.args[0] if error.args else error).strip().splitlines()
    # When a config file raises, config_flags puts its whole traceback into the message.
    print(f"error: {' '.join(lines) if len(lines) < 4 else lines[-1]}", file=sys.stderr)
    sys.exit(2)
