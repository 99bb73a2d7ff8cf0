"""Sections as flags: every field of a section is `--section.field`, checked by the section itself."""

import argparse
import json
from typing import Any, TypeVar, get_args, get_origin

from pydantic_core import PydanticUndefined

from .errors import UserError
from .settings import Section

S = TypeVar("S", bound=Section)


def add_flags(parser: argparse.ArgumentParser, section: type[Section], *, prefix: str | None = None) -> None:
    """`--kv.budget 512` for each field; `prefix=""` gives plain `--max-tokens`. Dashes and underscores are the same."""
    prefix = f"{section.section}." if prefix is None else prefix
    group = parser.add_argument_group(section.section, (section.__doc__ or "").splitlines()[0])
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, PydanticUndefined) or default == {} else f" [{default}]"
        how: dict[str, Any] = {"metavar": "JSON" if _is_container(field.annotation) else name.upper()}
        if field.annotation is bool:
            how = {"nargs": "?", "const": "true", "metavar": "true|false"}
        dest, dashed = f"{section.section}.{name}", name.replace("_", "-")
        group.add_argument(f"--{prefix}{dashed}", dest=dest, help=f"{field.description}{shown}".replace("%", "%%"), **how)
        if dashed != name:
            group.add_argument(f"--{prefix}{name}", dest=dest, help=argparse.SUPPRESS, **how)


def from_flags(args: argparse.Namespace, section: type[S]) -> S:
    """The section as the flags set it; what is not named keeps its default."""
    given = {}
    for name in section.model_fields:
        value = getattr(args, f"{section.section}.{name}")
        if value is not None:
            given[name] = _parsed(value, f"{section.section}.{name}", section.model_fields[name].annotation)
    return section(**given)


def _parsed(text: str, key: str, annotation: Any) -> Any:
    """Containers are written as JSON (`[2, 50256]`, `{"mix": 0.2}`); the section converts and checks the rest."""
    if not _is_container(annotation):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{key} = {text} is not JSON ({error.msg}): write it like '[1, 2]' or '{{\"mix\": 0.2}}'.") from error


def _is_container(annotation: Any) -> bool:
    return bool({get_origin(kind) for kind in (annotation, *get_args(annotation))} & {tuple, dict})
