"""`advantage`: how rewards of a group become advantages."""

from typing import ClassVar

from pydantic import Field

from .section import Section


class AdvantageConfig(Section):
    """What a sample is worth against the others of its prompt."""

    section: ClassVar[str] = "advantage"

    std: bool = Field(True, description="Whether advantages are divided by the group's standard deviation.")
    drop_zero_signal: bool = Field(
        False,
        description="Whether groups whose rewards are all equal are dropped; loss.name = dapo always does, and draws others.",
    )
    overlong: int = Field(
        0, ge=0, description="Tokens before max_tokens over which a penalty on long answers grows to -1 (DAPO); 0 is off."
    )
    mask_truncated: bool = Field(
        False, description="Whether answers cut off at max_tokens are not learned from; in their group's mean they count."
    )
