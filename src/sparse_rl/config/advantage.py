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
        description="Drop groups with equal rewards. rollout.refill also replaces them.",
    )
    overlong: int = Field(
        0,
        ge=0,
        description="Number of tokens before max_tokens over which a penalty grows from 0 to -1 (DAPO); 0 disables it.",
    )
    mask_truncated: bool = Field(False, description="Exclude truncated answers from the loss, but not from group means.")
