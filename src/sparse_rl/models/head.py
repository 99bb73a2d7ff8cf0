"""The LM head, and a forward pass that stops before it. The learner never stores the logits of all tokens."""

# n kept tokens, D hidden dimension, V vocabulary

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .attention import AttentionView, inputs


@dataclass(frozen=True)
class Head:
    """LM head: logits = scale * (hidden @ weight.T + bias)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float

    def __call__(self, hidden_nD: Tensor) -> Tensor:
        logits_nV = F.linear(hidden_nD, self.weight_VD, self.bias_V)
        return logits_nV if self.scale == 1.0 else logits_nV * self.scale


def hidden_states(
    model: PreTrainedModel, tokens_1N: Tensor, positions_1N: Tensor, view: AttentionView, keep_n: Tensor
) -> Tensor:
    """Return the inputs of the LM head at the tokens in `keep`, [n, D], with attention computed by the view."""
    decoder = model.base_model if model.base_model is not model else model.model  # some models have no base_model_prefix
    return decoder(**inputs(tokens_1N, positions_1N, view)).last_hidden_state[0, keep_n]
