"""Dr. GRPO: GRPO with a constant divisor and advantages that are not divided by the standard deviation (arXiv 2503.20783).

The weight of a sample then depends neither on its length nor on its group.
"""

# B sequences, T response tokens

from __future__ import annotations

from .base import PolicyLoss
from .grpo import loss

DR_GRPO = PolicyLoss(loss, aggregate="constant", std=False)
