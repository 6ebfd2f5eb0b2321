"""Families of models and ways of quantising of one's own, which a config's `base.own` names."""

from orbit_jax.checkpoint.quantization import Method, add_method
from orbit_jax.model.families import add_family
from orbit_jax.model.family import Family
from orbit_jax.own_code import load_own


def make_known(name: str) -> None:
    """Adds what `my_file.py:name` is, a `Family` or a `Method`, to those that loading knows.

    Only a config names code that runs; what a checkpoint says of itself never does.

    Raises:
      ValueError: if there is no such thing in the file, it is neither, or its name is taken.
    """
    found = load_own(name)
    if isinstance(found, Family):
        add_family(found)
    elif isinstance(found, Method):
        add_method(found)
    else:
        raise ValueError(
            f"it is {found!r:.80}: give an orbit_jax.model.family.Family or an "
            "orbit_jax.checkpoint.quantization.Method"
        )
