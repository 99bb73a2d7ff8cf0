"""`correction`: presets and options that correct for the mismatch between sampler and learner."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from ..errors import UserError
from .section import Section

LOG_RATIO_LIMIT = 20.0
"""Limit of the absolute value of a log-prob ratio. Larger ones are clamped: exp(20) squared still fits float32."""

Weight = Literal["one", "token", "sequence", "mean"]
Drop = Literal["none", "token", "sequence", "mean"]
Divisor = Literal["tokens", "kept"]
Preset = Literal[
    "none", "paper", "released", "reject_only", "reweight_only", "tis", "icepop", "sequence_mask", "geometric_mask"
]


@dataclass(frozen=True)
class CorrectionSpec:
    """A fully specified correction.

    The levels are `token` (xi_t), `sequence` (exp(sum_t log xi_t)) and `mean` (exp(mean_t log xi_t)).
    """

    weight: Weight = "one"
    cap: float = math.inf
    normalize: bool = False
    veto: float = 0.0
    drop: Drop = "none"
    low: float = 0.0
    high: float = math.inf
    divisor: Divisor = "tokens"

    @property
    def rejects_sequences(self) -> bool:
        """Return whether a rule drops whole sequences."""
        return self.veto > 0 or self.drop in ("sequence", "mean")

    @property
    def corrects(self) -> bool:
        """Return whether anything depends on the mismatch: a weight, or a rule that drops tokens or sequences."""
        return self.weight != "one" or self.veto > 0 or self.drop != "none"

    @property
    def judged(self) -> Literal["rejected", "unlikely"]:
        """Share of rollouts that a budget is judged by: the rejected ones, or, if no rule drops sequences, those that the paper's
        veto would reject."""
        return "rejected" if self.rejects_sequences else "unlikely"

    @property
    def judged_metric(self) -> str:
        """Metric of a step with the share that `judged` names."""
        return "sparse/rejection_rate" if self.rejects_sequences else "sparse/unlikely"

    def __post_init__(self) -> None:
        bounded = self.low > 0 or self.high < math.inf
        if self.low >= self.high:
            raise UserError(
                f"correction.low = {self.low:g} and high = {self.high:g} would drop every token: low must be below high."
            )
        if bounded and self.drop == "none":
            raise UserError(
                f"correction.low = {self.low:g} and high = {self.high:g} have no effect with correction.drop = none: set "
                "correction.drop to token, sequence or mean, or use another correction.preset."
            )
        if self.drop != "none" and not bounded:
            raise UserError(f"correction.drop = {self.drop} has no bound: set correction.low or correction.high.")
        if self.cap < math.inf and self.weight == "one":
            raise UserError(
                f"correction.cap = {self.cap:g} has no effect with correction.weight = one: set correction.weight to "
                "token, sequence or mean, or use another correction.preset."
            )


PRESETS: dict[str, CorrectionSpec] = {
    "none": CorrectionSpec(),
    "paper": CorrectionSpec(weight="token", veto=1e-4),
    "released": CorrectionSpec(
        weight="token", cap=1.5, normalize=True, veto=1e-4, drop="token", low=0.5, high=1.5, divisor="kept"
    ),
    "reject_only": CorrectionSpec(veto=1e-4),
    "reweight_only": CorrectionSpec(weight="token"),
    "tis": CorrectionSpec(weight="token", cap=2.0),
    "icepop": CorrectionSpec(weight="token", drop="token", low=0.5, high=5.0),
    "sequence_mask": CorrectionSpec(weight="sequence", drop="sequence", high=3.0),
    "geometric_mask": CorrectionSpec(drop="mean", low=0.99, high=1.01),
}


class CorrectionConfig(Section):
    """Correction of the mismatch between sampler and learner: a preset, and options that override it."""

    section: ClassVar[str] = "correction"

    preset: Preset | None = Field(
        None,
        description="Correction preset; default: the method's, in eval paper. The options below override single values.",
    )
    weight: Weight | None = Field(
        None,
        description="Weight of a token: 1, its ratio, the sequence's, or the sequence's geometric mean.",
    )
    cap: float | None = Field(None, gt=0, allow_inf_nan=True, description="Upper bound of weights; inf disables it.")
    normalize: bool | None = Field(None, description="Divide weights by their mean over the update.")
    veto: float | None = Field(None, ge=0, lt=1, description="Drop a sequence with any token ratio below this; 0 disables it.")
    drop: Drop | None = Field(
        None,
        description="Drop tokens, or sequences by product (sequence) or geometric mean (mean), with a ratio outside [low, high].",
    )
    low: float | None = Field(None, ge=0, description="Lower bound of the ratio for drop; 0 disables it.")
    high: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="Upper bound of the ratio for drop; inf disables it."
    )
    divisor: Divisor | None = Field(
        None, description="Divide a sequence's loss, KL included, by all its tokens or by the kept ones."
    )
    opsm: float | None = Field(
        None,
        ge=0,
        description="Drop a sequence with negative advantage and a mean log(sampler/learner) above this, such as 0.5.",
    )

    def spec(self, default: str) -> CorrectionSpec:
        """Return the fully specified correction. `default` is the preset to use if none is set."""
        options = self.model_dump(exclude={"preset", "opsm"}, exclude_none=True)
        return replace(PRESETS[self.preset or default], **options)
