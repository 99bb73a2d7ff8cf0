"""How a section of options is defined: typed, bounded, refused in one sentence. Imports no torch, so that help is quick."""

import difflib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UserError


class Section(BaseModel):
    """Options that belong together. Unknown keys and values out of bounds raise `UserError` with the remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    section: ClassVar[str] = ""
    """The name the section has in TOML and in flags."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(self._sentence(error)) from None

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        # of a place inside the field only an index helps: the others are pydantic's names for the kinds it tried
        place = [str(part) for index, part in enumerate(first["loc"]) if index == 0 or isinstance(part, int)]
        key = ".".join([*([cls.section] if cls.section else []), *place])
        if first["type"] == "extra_forbidden":
            known = [field.alias or name for name, field in cls.model_fields.items()]
            close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            return f"Unknown option {key}: {hint}"
        if first["type"] == "value_error":  # raised by our own validators: a whole sentence already
            return str(first["ctx"]["error"])
        return f"{key} = {first['input']!r} is refused: {first['msg'][0].lower()}{first['msg'][1:]}."
