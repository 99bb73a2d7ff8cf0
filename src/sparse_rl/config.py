"""Sections as flags and as TOML: one schema, every field is `--section.field`, checked by the section itself."""

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic_core import PydanticUndefined

from .errors import UserError, first_line
from .reading import read_file
from .settings import Section
from .text import printable, quoted

S = TypeVar("S", bound=Section)
LARGEST_RECIPE = 2**20
"""Bytes."""


# Flags


def add_flags(
    parser: argparse.ArgumentParser, section: type[Section], *, prefix: str | None = None, without: Collection[str] = ()
) -> None:
    """`--kv.budget 512` for each field; `prefix=""` gives plain `--max-tokens`. Dashes and underscores are the same."""
    prefix = _dotted(section) if prefix is None else prefix
    group = parser.add_argument_group(section.section or "the run", (section.__doc__ or "").splitlines()[0])
    for name, key, field in _fields(section):
        if name in without:
            continue
        if nested := _section_of(field.annotation):
            add_flags(parser, nested)
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, PydanticUndefined, ()) or default == {} else f" [{default}]"
        how: dict[str, Any] = {"metavar": _metavar(name, field.annotation)}
        if field.annotation is bool:
            how = {"nargs": "?", "const": "true", "metavar": "true|false"}
        dest, dashed = _dotted(section) + key, key.replace("_", "-")
        group.add_argument(f"--{prefix}{dashed}", dest=dest, help=f"{field.description}{shown}".replace("%", "%%"), **how)
        if dashed != key:
            group.add_argument(f"--{prefix}{key}", dest=dest, help=argparse.SUPPRESS, **how)


def from_flags(args: argparse.Namespace, section: type[S], base: dict[str, Any] | None = None) -> S:
    """The section as `base` and then the flags set it; what neither names keeps its default."""
    return section(**merged_tables(base or {}, flags_given(args, section)))


def flags_given(args: argparse.Namespace, section: type[Section]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for _, key, field in _fields(section):
        if nested := _section_of(field.annotation):
            if inner := flags_given(args, nested):
                given[key] = inner
            continue
        value = getattr(args, _dotted(section) + key, None)
        if value is not None:
            given[key] = _parsed(value, _dotted(section) + key, field.annotation)
    return given


def _dotted(section: type[Section]) -> str:
    return f"{section.section}." if section.section else ""


def _fields(section: type[Section]):
    """(Python's name, the key in TOML and flags, the field): they differ where the key is a word of Python's."""
    for name, field in section.model_fields.items():
        yield name, field.alias or name, field


def _metavar(name: str, annotation: Any) -> str:
    return "LIST" if _is_container(annotation, tuple) else "JSON" if _is_container(annotation) else name.upper()


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _parsed(text: str, key: str, annotation: Any) -> Any:
    """A list is written with commas (`2,50256`) or as JSON, a table as JSON (`{"mix": 0.2}`); the section converts and checks
    the rest."""
    kinds = get_args(annotation)
    if type(None) in kinds and text.lower() in ("none", "null") and not any(text in get_args(kind) for kind in kinds):
        return None  # but `--correction.preset none` is a preset
    if not _is_container(annotation):
        return text
    is_list = _is_container(annotation, tuple)
    if is_list and not text.lstrip().startswith("["):
        return [part.strip().strip("\"'") for part in text.split(",")] if text.strip() else []
    example = "dense,sparse_rl or '[1, 2]'" if is_list else "'{\"mix\": 0.2}'"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{key} = {printable(text)} is not JSON ({error.msg}): write it like {example}.") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UserError(f"{key} = {printable(text)} cannot be read ({first_line(error)}): write it like {example}.") from error


def _is_container(annotation: Any, *kinds: type) -> bool:
    return bool({get_origin(kind) for kind in (annotation, *get_args(annotation))} & set(kinds or (tuple, dict)))


# TOML


def recipe(name: str) -> dict[str, Any]:
    """A shipped recipe by name, or a TOML file by path, on top of the one it `extends`."""
    return _recipe(name if name in recipe_names() else os.path.normpath(name), ())


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def _recipe(name: str, via: tuple[str, ...]) -> dict[str, Any]:
    if name in via:
        raise UserError(f"Recipe {name!r} extends itself ({' -> '.join((*via, name))}): remove one extends.")
    values = _read_toml(name)
    if name in recipe_names():
        _find_beside(values.get("data", {}))
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise UserError(f"extends = {quoted(parent)} in {name} must be the name of a recipe or a path.")
    if parent not in recipe_names():  # a path is meant from the file that names it
        parent = os.path.normpath(Path(name).parent / parent)
    return merged_tables(_recipe(parent, (*via, name)), values)


def recipe_text(name: str) -> str:
    """A shipped recipe as it was written, with its comments."""
    return (_shipped() / f"{name}.toml").read_text(encoding="utf-8")


def _find_beside(data: dict[str, Any]) -> None:
    """Files that are shipped beside a recipe get their whole path: other paths are meant from where the user is."""
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
        close = difflib.get_close_matches(Path(name).name, recipe_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"give a path or one of {', '.join(recipe_names())}."
        raise UserError(f"There is no recipe {quoted(name)}: {hint}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"The recipe {name} is not TOML: {error}.") from error
    except (OSError, ValueError, RecursionError) as error:  # not text, a NUL in its name, too many digits or brackets
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"The recipe {printable(name)} cannot be read ({why}): give a TOML file.") from error


def _shipped():
    return files("sparse_rl") / "recipes"


def merged_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins, key by key; only the tables of sections are merged, `kv.options` is a value."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict) and key != "options"
        merged[key] = merged_tables(merged[key], value) if both_tables else value
    return merged


def to_toml(section: Section) -> str:
    """The resolved values; None is left out, as TOML has no word for it."""
    import tomli_w

    return tomli_w.dumps(_without_none(section.model_dump(mode="json", by_alias=True)))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items() if value is not None
    }
