"""Read and write recipes: TOML files with the keys of `Config`, selected by shipped name or path."""

import os
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from ..reading import read_file
from ..text import did_you_mean, printable, quoted
from .migrate import FREE_TABLES, migrated_tables
from .section import Section

LARGEST_RECIPE = 2**20
"""Maximum size of a recipe file in bytes."""


def recipe(name: str) -> dict[str, Any]:
    """Return a shipped recipe by name or a TOML file by path, merged over the recipe that it `extends`."""
    return migrated_tables(_recipe(name if name in recipe_names() else os.path.normpath(name), ()))


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def _recipe(name: str, via: tuple[str, ...]) -> dict[str, Any]:
    if name in via:
        raise UserError(f"Recipe {name!r} extends itself in a cycle ({' -> '.join((*via, name))}): remove one extends.")
    values = _read_toml(name)
    if name in recipe_names():
        _find_beside(values.get("data", {}))
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise UserError(f"extends = {quoted(parent)} in {name} is invalid: it must be a recipe name or a path.")
    if parent not in recipe_names():  # a path is relative to the file that contains it
        parent = os.path.normpath(Path(name).parent / parent)
    return merged_tables(_recipe(parent, (*via, name)), values)


def recipe_text(name: str) -> str:
    """Return the text of a shipped recipe, including its comments."""
    return (_shipped() / f"{name}.toml").read_text(encoding="utf-8")


def _find_beside(data: dict[str, Any]) -> None:
    """Replace the paths of files shipped with a recipe by absolute paths. Other paths are relative to the current folder."""
    for key in ("train", "test"):
        beside = Path(str(_shipped())) / str(data.get(key))
        if beside.is_file():
            data[key] = str(beside)


def _read_toml(name: str) -> dict[str, Any]:
    shipped = _shipped() / f"{name}.toml"
    try:
        content = shipped.read_bytes() if name in recipe_names() else read_file(name, LARGEST_RECIPE)
        return tomllib.loads(content.decode())
    except (FileNotFoundError, IsADirectoryError) as error:
        hint = did_you_mean(Path(name).name, recipe_names(), f"pass a path or one of {', '.join(recipe_names())}.")
        raise UserError(f"Recipe {quoted(name)} does not exist: {hint}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"Recipe {name} is not valid TOML: {error}.") from error
    except (OSError, ValueError, RecursionError) as error:  # not text, a NUL in the path, or too many digits or brackets
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"The recipe {printable(name)} cannot be read ({why}): pass a TOML file.") from error


def _shipped():
    return files("sparse_rl") / "recipes"


def merged_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `over` replaced. Only section tables are merged; `kv.options` is replaced as a whole."""
    merged, free = dict(base), {table.rpartition(".")[2] for table in FREE_TABLES}
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in free
        merged[key] = merged_tables(merged[key], value) if both_tables else value
    return merged


def to_toml(section: Section) -> str:
    """Return the resolved values as TOML. Options with the value None are omitted, because TOML has no null."""
    import tomli_w

    return tomli_w.dumps(_without_none(section.model_dump(mode="json", by_alias=True)))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items() if value is not None
    }
