"""Write docs/config.md from the schema: every option with type, default, bounds and sentence.

python docs/make_config.py
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sparse_rl.config import Config, Sampling, Section
from sparse_rl.config.migrate import REMOVED

PAGE = Path(__file__).parent / "config.md"
HEAD = """\
# Configuration

Generated from the schema by `python docs/make_config.py`. A key is the same in a recipe and on the command line:

```toml
[kv]
budget = 256   # --kv.budget 256
```

Flags override the recipe, and a recipe overrides the one it `extends`. Flags may use dashes or underscores. Write a list with commas
(`--log.to wandb,tensorboard`), a table as JSON (`--kv.options '{"mix": 0.2}'`), and `none` to unset an option. An unknown key is an
error that suggests the closest match. `sparse-rl train … --dry-run` shows the resolved values.
"""
GENERATE = """\
## `sparse-rl generate`

`generate` takes the flags of `kv` above and these, without a prefix: `--max-tokens 256`.
"""
REMOVED_HEAD = """\
## Removed options

A stored `config.toml` may still hold these with the value shown, which changed nothing. Other values are errors.

| key | value | instead |
|---|---|---|"""
WORDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def page() -> str:
    parts = [HEAD]
    for section in sections(Config):
        name = f"`{section.section}`" if section.section else "The run itself"
        parts += [f"## {name}\n\n{summary(section)}\n", table(section, f"{section.section}." if section.section else "")]
    removed = [f"| `{key}` | `{json.dumps(value)}` | {remedy} |" for key, (value, remedy) in REMOVED.items()]
    removed += [
        "| `loss.kl_estimator = k1` | | `k2` or `k3`: the gradient of k1 is zero on average |",
        "| `loss.smd.estimator` | `full`, `top-K` | `loss.smd.top_k`; these values are converted |",
    ]
    return "\n".join([*parts, GENERATE, table(Sampling, ""), REMOVED_HEAD, *removed, ""])


def sections(section: type[Section]) -> Iterator[type[Section]]:
    """The section and those inside it, in the order of the schema."""
    yield section
    for field in section.model_fields.values():
        if is_section(field.annotation):
            yield from sections(field.annotation)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def summary(section: type[Section]) -> str:
    return (section.__doc__ or "").splitlines()[0]


def table(section: type[Section], prefix: str) -> str:
    rows = [
        f"| `{prefix}{field.alias or name}` | {kind(field.annotation)}{bounds(field.metadata)} | {default(field)} | {cell(field.description)} |"
        for name, field in section.model_fields.items()
        if not is_section(field.annotation)
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


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
    found = [f"{sign} {number(getattr(rule, name))}" for rule in rules for name, sign in SIGNS.items() if hasattr(rule, name)]
    return f" {' and '.join(found)}" if found else ""


def number(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value > 1e6 else f"{value:g}"


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def cell(text: str | None) -> str:
    assert text, "every option has a sentence"
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
