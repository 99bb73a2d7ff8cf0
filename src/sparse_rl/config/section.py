"""Base class of all config sections: typed fields with bounds, and one-sentence errors. Imports no torch."""

import math
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from ..errors import UserError
from ..text import did_you_mean, is_unicode, quoted

LARGEST_FLOAT = 3.4e38
"""Maximum absolute value of a float option. Larger values are not finite in float32, the dtype of weights and losses."""
LARGEST_INT = 2**63 - 1
DEEPEST = 8
"""Maximum nesting depth of lists and tables."""


class Section(BaseModel):
    """A group of related options. Unknown keys and values out of bounds raise `UserError` with a fix."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    section: ClassVar[str] = ""
    """Name of the section in TOML files and flags."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(self._sentence(error)) from None

    def changed(self, **options: Any) -> Self:
        """Return a copy with other values, which are not checked. A dict changes options of a nested section."""
        for name, value in options.items():
            if isinstance(value, dict) and isinstance(section := getattr(self, name), Section):
                options[name] = section.changed(**value)
        return self.model_copy(update=options)

    @field_validator("*")
    @classmethod
    def _check_value(cls, value: Any, info: ValidationInfo) -> Any:
        if why := _unusable(value):
            name = info.field_name or ""
            raise ValueError(f"{cls._key(cls.model_fields[name].alias or name)} = {quoted(value)} is invalid: {why}.")
        return value

    @classmethod
    def _key(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        first, *others = error.errors()
        # Within a field, only an index is informative: the other parts are pydantic's names of the types that it tried.
        place = [str(part) for index, part in enumerate(first["loc"]) if index == 0 or isinstance(part, int)]
        key = cls._key(".".join(place))
        if first["type"] == "extra_forbidden":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            hint = did_you_mean(str(first["loc"][-1]), known, f"valid options are {', '.join(known)}.")
            return f"Unknown option {key}: {hint}"
        if first["type"] == "value_error":  # raised by our own validators, whose message is already complete
            return str(first["ctx"]["error"])
        if first["type"] == "model_type":
            name, field = next(iter(cls.model_fields[place[0]].annotation.model_fields.items()))  # type: ignore[union-attr]
            option = f"{key}.{field.alias or name}"
            return f"{key} = {quoted(first['input'])} is invalid: {key} is a table. Set an option in it, such as {option}."
        why = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        words = [
            each["ctx"]["expected"] for each in others if each["type"] == "literal_error" and each["loc"][0] == first["loc"][0]
        ]
        if words:  # a number or a word, such as auto
            why = f"{why.split(',')[0]}, or {' or '.join(words)}"
        return f"{key} = {quoted(first['input'])} is invalid: {why}."


def _unusable(value: Any, depth: int = 0) -> str | None:
    """Return why a value is invalid for any option, or None if it is valid."""
    if isinstance(value, str) and "\0" in value:
        return "text must not contain a NUL character"
    if isinstance(value, str) and not is_unicode(value):
        return "text must be valid UTF-8"
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return "an integer must fit into 64 bits"
    if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT and not (depth == 0 and math.isinf(value)):
        # infinity is valid only if the option allows it
        return f"a float must be between -{LARGEST_FLOAT:g} and {LARGEST_FLOAT:g}"
    if isinstance(value, list | tuple | dict):
        if depth == DEEPEST:
            return f"lists and tables must not be nested deeper than {DEEPEST} levels"
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next((why for part in parts if (why := _unusable(part, depth + 1))), None)
    return None
