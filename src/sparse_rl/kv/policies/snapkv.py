"""SnapKV: keep the keys that the last queries attend to (arXiv 2404.14469), in the decode form used by R-KV or the original
form."""

# B rows, H kv heads, G query heads per kv head, W queries of the window, T cached tokens

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...kernels.importance import causal_window_logits, decode_importance
from ...kernels.rows import Rows
from .base import Policy
from .pooling import check_kernel, pool


@dataclass(frozen=True)
class SnapKV(Policy):
    kernel: int = 7
    """Width of the pooling, in tokens; must be odd."""
    form: Literal["decode", "prefill"] = "decode"
    """`decode` uses only R-KV's importance. `prefill` is the original form: softmax over all keys, summed over the window."""
    pool: Literal["max", "avg"] = "max"
    """Kind of pooling along time."""

    uses_queries: ClassVar[bool] = True
    uses_values: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)
        if self.form not in ("decode", "prefill") or self.pool not in ("max", "avg"):
            raise ValueError(
                f"snapkv form = {self.form}, pool = {self.pool} is invalid: form must be decode or prefill, and pool must "
                "be max or avg."
            )

    def scores(self, queries, keys, values, *, seeds=None, positions=None):
        if self.form == "decode":
            return pool(decode_importance(queries, keys), self.kernel, self.pool)
        keys = keys.take() if isinstance(keys, Rows) else keys
        weights_BHGWT = causal_window_logits(queries, keys).softmax(dim=-1)
        window, total = weights_BHGWT.shape[-2:]
        sums_BHGn = weights_BHGWT.sum(dim=-2)[..., : total - window]
        pooled_BHGn = pool(sums_BHGn.flatten(1, 2), self.kernel, self.pool).view_as(sums_BHGn)
        return pooled_BHGn.mean(dim=2)
