"""Define and parse command-line flags: every field of a section becomes `--section.field`."""

import argparse
import json
from collections.abc import Collection
from typing import Any, TypeVar, get_args, get_origin

from pydantic_core import PydanticUndefined

from ..errors import UserError, first_line
from ..text import printable
from .recipe import merged_tables
from .section import Section

S = TypeVar("S", bound=Section)


def add_flags(
    parser: argparse.ArgumentParser, section: type[Section], *, prefix: str | None = None, without: Collection[str] = ()
) -> None:
    """Add one flag per field, e.g. `--kv.budget 512`. `prefix=""` gives plain flags, e.g. `--max-tokens`. Dashes and
    underscores are interchangeable."""
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
        if field.annotation is bool or bool in get_args(field.annotation):
            how = {"nargs": "?", "const": "true", "metavar": _truth(field.annotation)}
        dest, dashed = _dotted(section) + key, key.replace("_", "-")
        group.add_argument(f"--{prefix}{dashed}", dest=dest, help=f"{field.description}{shown}".replace("%", "%%"), **how)
        if dashed != key:
            group.add_argument(f"--{prefix}{key}", dest=dest, help=argparse.SUPPRESS, **how)


def from_flags(args: argparse.Namespace, section: type[S], base: dict[str, Any] | None = None) -> S:
    """Return the section with the values of `base`, overridden by the flags. Other options keep their defaults."""
    return section(**merged_tables(base or {}, flag_values(args, section)))


def flag_values(args: argparse.Namespace, section: type[Section]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _, key, field in _fields(section):
        if nested := _section_of(field.annotation):
            if inner := flag_values(args, nested):
                values[key] = inner
            continue
        value = getattr(args, _dotted(section) + key, None)
        if value is not None:
            values[key] = _parsed(value, _dotted(section) + key, field.annotation)
    return values


def _dotted(section: type[Section]) -> str:
    return f"{section.section}." if section.section else ""


def _fields(section: type[Section]):
    """Yield (Python name, key in TOML and flags, field). The names differ if the key is a Python keyword."""
    for name, field in section.model_fields.items():
        yield name, field.alias or name, field


def _metavar(name: str, annotation: Any) -> str:
    return "LIST" if _is_container(annotation, tuple) else "JSON" if _is_container(annotation) else name.upper()


def _truth(annotation: Any) -> str:
    words = [word for kind in get_args(annotation) for word in get_args(kind)]
    return "|".join(["true", "false", *words])


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _parsed(text: str, key: str, annotation: Any) -> Any:
    """Parse the text of a flag. A list is written with commas (`2,50256`) or as JSON, a table as JSON (`{"mix": 0.2}`). The
    section converts and checks all other types."""
    kinds = get_args(annotation)
    if type(None) in kinds and text.lower() in ("none", "null") and not any(text in get_args(kind) for kind in kinds):
        return None  # `--correction.preset none` is excluded because it is a preset
    if not _is_container(annotation):
        return text
    is_list = _is_container(annotation, tuple)
    if is_list and text.lower() in ("none", "null"):
        return []
    if is_list and not text.lstrip().startswith("["):
        return [part.strip().strip("\"'") for part in text.split(",")] if text.strip() else []
    example = "dense,sparse_rl or '[1, 2]'" if is_list else "'{\"mix\": 0.2}'"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{key} = {printable(text)} is not valid JSON ({error.msg}). Example: {example}.") from error
    except (ValueError, RecursionError) as error:  # an integer with thousands of digits, or thousands of brackets
        raise UserError(f"{key} = {printable(text)} cannot be parsed ({first_line(error)}). Example: {example}.") from error


def _is_container(annotation: Any, *kinds: type) -> bool:
    return bool({get_origin(kind) for kind in (annotation, *get_args(annotation))} & set(kinds or (tuple, dict)))
