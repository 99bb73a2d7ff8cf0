"""DAPO: every token of the update has the same weight, and the upper clip is wider (arXiv 2503.14476).

Its other parts are options of `advantage`: dropping groups without signal, and a soft penalty on overlong responses.
"""

# B sequences, T response tokens

from __future__ import annotations

from .base import PolicyLoss
from .grpo import loss

DAPO = PolicyLoss(loss, aggregate="token")
