"""Cells of a sweep: a grid of values, read from the command line, times seeds."""

import ast
import copy
import dataclasses
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from orbit_jax.config import Config, from_config_dict, to_dict
from orbit_jax.runs.files import to_json
from orbit_jax.runs.folder import flat
from orbit_jax.runs.resuming import MAY_DIFFER

# Fields that runs of one sweep need not have in common; each cell has its own seed.
HARMLESS = {*MAY_DIFFER, "seed"} - {"steps", "parity", "base.path"}
_LONGEST_NAME = 150  # characters


@dataclasses.dataclass(eq=False)
class Cell:
    """One run.

    Attributes:
      name: its folder beneath the sweep's.
      settings: values of swept fields by their dotted names.
      config: all of it, as a plain dict.
      error: why it failed when it was last tried, or "".
      figures: of a finished run, the numbers of its summary, `gain`, and each metric's last value.
      commit: of the code that it began with.
    """

    name: str
    settings: dict[str, Any]
    seed: int
    config: dict[str, Any]
    error: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    commit: str | None = None

    @property
    def identity(self) -> str:
        """Equal for cells that are the same run."""
        fields = flat(self.config).items()
        return to_json([(k, v) for k, v in sorted(fields) if k == "seed" or k not in HARMLESS])


def read_grid(texts: Sequence[str], config: Config) -> dict[str, tuple[Any, ...]]:
    """Field -> values, of texts such as `adapter.rank=4,16`.

    A value is read as the type that its field has; one that does not read as that is left for the
    config to refuse.
    """
    grid: dict[str, tuple[Any, ...]] = {}
    fields = flat(to_dict(config))
    for text in texts:
        name, equals, values = text.partition("=")
        field = name.strip().removeprefix("config.")
        if not equals or not field:
            raise ValueError(
                f"grid={text!r}: give a field and its values, as optimizer.learning_rate=1e-4,5e-4"
            )
        if field == "seed":
            raise ValueError(f"grid={text!r}: seeds are no setting: use --seeds={values}")
        if field in grid:
            raise ValueError(f"grid={text!r}: {field} is there twice: give all its values at once")
        parts = re.split(r",(?![^(\[]*[)\]])", values)  # no comma of a tuple
        grid[field] = tuple(_value(fields.get(field), part.strip()) for part in parts)
    return grid


def read_seeds(texts: Sequence[str]) -> tuple[int, ...]:
    """The seeds of a list of texts."""
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ValueError(f"seeds={','.join(texts)}: give whole numbers, as 0,1,2") from None


def cells_of(
    base: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Cell]:
    """A cell for each setting and seed; every setting has its first seed before any its second."""
    cells: dict[str, Cell] = {}
    for seed, *values in itertools.product(seeds, *grid.values()):
        settings = dict(zip(grid, values, strict=True))
        name = _name(settings, seed, base)
        try:
            config = to_dict(from_config_dict(merged(base, settings | {"seed": seed})))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        cell = Cell(name, settings, seed, config)
        twin = cells.setdefault(cell.identity, cell)
        if twin is not cell:
            raise ValueError(f"{name} and {twin.name} are the same run: give each value once")
    if len({cell.name for cell in cells.values()}) < len(cells):
        raise ValueError("grid: two settings have one name: sweep them apart")
    return list(cells.values())


def merged(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config in which these fields are set."""
    given = copy.deepcopy(dict(base))
    for field, value in settings.items():
        *path, last = field.split(".")
        section = given
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ValueError(f"config.{field}: there is no such field; {part} has none")
        section[last] = value
    return given


def short(field: str, config: Mapping[str, Any]) -> str:
    """A field's last name, unless another field has it too."""
    last = field.rpartition(".")[2]
    return last if Counter(f.rpartition(".")[2] for f in flat(config))[last] < 2 else field


def shown(value: Any) -> str:
    """A value in words, or as a part of a folder's name."""
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value)


def order(values: Sequence[Any]) -> list[Any]:
    """The different values: numbers in their order, others as they come."""
    different = [v for i, v in enumerate(values) if v not in values[:i]]
    return sorted(different) if numeric(different) else different


def numeric(values: Sequence[Any]) -> bool:
    """Whether all are numbers, as an axis needs them."""
    return all(type(value) in (int, float) for value in values)


def _value(default: Any, text: str) -> Any:
    """The value that a text means for a field with this default, or the text."""
    readers = {int: int, float: float, tuple: ast.literal_eval}
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return readers.get(type(default), str)(text)
    except (ValueError, SyntaxError):
        return text


def _name(settings: Mapping[str, Any], seed: int, base: Mapping[str, Any]) -> str:
    """A cell's folder: the same for a value however it was written."""
    parts = (f"{short(f, base)}={shown(value)}" for f, value in settings.items())
    setting = quote(",".join(parts), safe=" ,:+=@")
    if len(setting) > _LONGEST_NAME:
        mark = hashlib.sha256(setting.encode()).hexdigest()[:8]
        setting = f"{setting[:_LONGEST_NAME]}-{mark}"
    return f"{setting}/seed={seed}" if setting else f"seed={seed}"
