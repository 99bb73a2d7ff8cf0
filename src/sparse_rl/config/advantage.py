"""`advantage`: options of group advantages."""

from typing import ClassVar

from pydantic import Field

from .section import Section


class AdvantageConfig(Section):
    """Advantage of a sample within its group."""

    section: ClassVar[str] = "advantage"

    std: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    drop_zero_signal: bool = Field(
        False,
        description="Drop groups with equal rewards; loss.name = dapo always does, and samples others.",
    )
    overlong: int = Field(
        0, ge=0, description="Tokens before max_tokens over which a length penalty grows to -1 (DAPO); 0 disables it."
    )
    mask_truncated: bool = Field(
        False, description="Leave answers cut off at max_tokens out of the loss; group means still count them."
    )
