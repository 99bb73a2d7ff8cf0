"""Write docs/config.md from the schema: every option with type, default, bounds and sentence.

python docs/make_config.py
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sparse_rl.config import Config, Section

PAGE = Path(__file__).parent / "config.md"
HEAD = """\
# Configuration

Recipe keys and flags have the same names:

```toml
[kv]
budget = 256   # --kv.budget 256
```

Flags override the recipe, which overrides the one it `extends`. Write a list with commas (`--log.to wandb,tensorboard`), a table as JSON
(`--kv.options '{"mix": 0.2}'`), and `none` to unset an option. Other values or bounds are in parentheses. `sparse-rl train … --dry-run` shows the resolved values.
`python docs/make_config.py` writes this page.
"""
WORDS = {int: "int", float: "float", bool: "bool", str: "text"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    parts = [HEAD]
    for section in sections(Config):
        name = f"`{section.section}`" if section.section else "The run itself"
        parts += [f"## {name}\n", table(section, f"{section.section}." if section.section else "")]
    return "\n".join(parts)


def sections(section: type[Section]) -> Iterator[type[Section]]:
    """The section and those inside it, in the order of the schema."""
    yield section
    for field in section.model_fields.values():
        if is_section(field.annotation):
            yield from sections(field.annotation)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def table(section: type[Section], prefix: str) -> str:
    rows = [
        f"| `{prefix}{field.alias or name}` | {values(field)} | {cell(field.description)} |"
        for name, field in section.model_fields.items()
        if not is_section(field.annotation)
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def values(field: FieldInfo) -> str:
    """The default, and in parentheses the other values or the type. A default shows its own type."""
    value = default(field)
    if field.annotation in (bool, str, str | None):
        return value
    if get_origin(field.annotation) is Literal:
        return f"{value} ({', '.join(f'`{other}`' for other in get_args(field.annotation) if other != field.default)})"
    allowed = kind(field.annotation) + bounds(field.metadata)
    if isinstance(field.default, int | float):
        allowed = re.sub(r"^(int|float) ?", "", allowed)
    allowed = allowed.removesuffix(f" or {value}")
    return f"{value} ({allowed})".strip() if allowed else value


def kind(annotation: Any) -> str:
    """The type in words; the values themselves where there are only some."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inside[0]) + bounds(rule for each in inside[1:] for rule in getattr(each, "metadata", [each]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin in (Union, UnionType):
        return " or ".join(kind(each) for each in inside if each is not NoneType)
    if origin is tuple:
        return f"list of {kind(inside[0])}" if inside[-1] is Ellipsis else f"[{', '.join(kind(each) for each in inside)}]"
    return "table" if origin is dict else WORDS[annotation]


def bounds(rules: Iterable[Any]) -> str:
    """The allowed range, such as " ≥ 1" or " 0-1"."""
    found = {name: number(getattr(rule, name)) for rule in rules for name in SIGNS if hasattr(rule, name)}
    if found.keys() == {"ge", "le"}:
        return f" {found['ge']}-{found['le']}"
    return f" {' and '.join(f'{SIGNS[name]} {limit}' for name, limit in found.items())}" if found else ""


def number(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value > 1e6 else f"{value:g}"


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def cell(text: str | None) -> str:
    assert text, "every option has a sentence"
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
