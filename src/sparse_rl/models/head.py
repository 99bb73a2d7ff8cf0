"""The LM head, and a forward pass that stops before it. The learner never stores the logits of all tokens.

Logits are float32 by default (`model.head_dtype`): products of half-precision numbers, accumulated in float32 and not rounded.
"""

# n kept tokens, D hidden dimension, V vocabulary

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.form import capped
from .attention import AttentionView, inputs


@dataclass(frozen=True)
class Head:
    """LM head: logits = scale * (hidden @ weight.T + bias), and softcap * tanh(logits / softcap) if they are capped."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    dtype: torch.dtype | None = None
    """Dtype of the logits; None for that of the weight."""
    softcap: float | None = None

    def __call__(self, hidden_nD: Tensor) -> Tensor:
        logits_nV = project(hidden_nD, self.weight_VD, self.bias_V, self.dtype)
        return capped(logits_nV if self.scale == 1.0 else logits_nV * self.scale, self.softcap)


def project(hidden_nD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Return hidden @ weight.T + bias in the dtype. On CUDA it has no autograd formula, so the caller computes gradients."""
    if dtype is None or dtype == weight_VD.dtype:
        return F.linear(hidden_nD, weight_VD, bias_V)
    if not weight_VD.is_cuda:  # float32 copies of half-precision operands have the same products
        return F.linear(hidden_nD.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype))
    logits_nV = torch.mm(hidden_nD, weight_VD.t(), out_dtype=dtype)
    return logits_nV if bias_V is None else logits_nV + bias_V


def hidden_states(
    model: PreTrainedModel, tokens_1N: Tensor, positions_1N: Tensor, view: AttentionView, keep_n: Tensor
) -> Tensor:
    """Return the inputs of the LM head at the tokens `keep_n`, [n, D], with attention computed by the view."""
    return decoder_output(model, tokens_1N, positions_1N, view)[0, keep_n]


def decoder_output(model: PreTrainedModel, tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView) -> Tensor:
    """Return the inputs of the LM head at all tokens, [B, T, D]."""
    decoder = model.base_model if model.base_model is not model else model.model  # some models have no base_model_prefix
    return decoder(**inputs(decoder, tokens_BT, positions_BT, view)).last_hidden_state
