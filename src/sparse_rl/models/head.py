"""Compute hidden states from token ids, and the head that turns them into logits. The learner never holds all logits."""

# n kept tokens, D hidden dimension, V vocabulary

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from .attention import AttentionView, attend_to_itself, eval_mode, inputs, prepare, run

LARGE_LOGIT = 256.0
"""Size of the logits in the second check of the head. Soft caps are 15 to 50."""


@dataclass(frozen=True)
class Head:
    """logits = scale * (hidden @ weight.T + bias)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float

    def __call__(self, hidden_nD: Tensor) -> Tensor:
        logits_nV = F.linear(hidden_nD, self.weight_VD, self.bias_V)
        return logits_nV if self.scale == 1.0 else logits_nV * self.scale


_scales: WeakKeyDictionary[PreTrainedModel, float] = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head:
    """Return the model's head. It is checked once, on one token: some models do more to their logits than a product."""
    layer = model.get_output_embeddings()
    if hasattr(layer, "get_delta_weight"):
        raise UserError("model.lora.targets names the output head, whose adapter the learner would not train: leave it out.")
    bias = getattr(layer, "bias", None)
    scale = _scales.get(model)
    if scale is None:
        with eval_mode(model):
            scale = _scales[model] = _scale(model, Head(layer.weight, bias, 1.0))
    return Head(layer.weight, bias, scale)


def share_head_scale(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Give this model the head's scale of another model."""
    _scales[model] = head_of(other).scale


def hidden_states(
    model: PreTrainedModel, tokens_1N: Tensor, positions_1N: Tensor, view: AttentionView, keep_n: Tensor
) -> Tensor:
    """Return the inputs of the head at the tokens in `keep`, [n, D], with attention computed by the view."""
    decoder = model.base_model if model.base_model is not model else model.model  # some models have no base_model_prefix
    return decoder(**inputs(tokens_1N, positions_1N, view)).last_hidden_state[0, keep_n]


@torch.no_grad()
def _scale(model: PreTrainedModel, head: Head) -> float:
    """Return the factor between the model's logits and the product with its head.

    A second check uses hidden states so large that a soft cap on the logits would show.
    """
    prepare(model)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    view, first = _OneToken(), torch.zeros(1, dtype=torch.long, device=model.device)
    position = torch.zeros_like(token)
    own_V = run(model, token, position, view, keep=1)[0, -1].float()
    hidden_1D = hidden_states(model, token, position, view, first)
    plain_V = head(hidden_1D)[0].float()
    if not bool(own_V.isfinite().all()):
        raise UserError("The model's logits are not finite: its weights are broken; go back to a checkpoint that samples.")
    scale = float(own_V @ plain_V / (plain_V @ plain_V))
    scale = 1.0 if abs(scale - 1) < 1e-3 else scale
    factor = 2.0 ** math.ceil(math.log2(LARGE_LOGIT / max(float(own_V.abs().max()), 1e-6)))
    with _scaled_input(model.get_output_embeddings(), factor):
        large_V = run(model, token, position, view, keep=1)[0, -1].float()
    scaled_V = head(hidden_1D * factor)[0].float()
    for own, plain in ((own_V, plain_V), (large_V, scaled_V)):
        if not torch.allclose(own, scale * plain, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
            raise UserError(
                f"{type(model).__name__} does more to its logits than a product with its head (a soft cap, perhaps), which the "
                "learner cannot do in chunks: use another model."
            )
    return scale


@contextmanager
def _scaled_input(layer: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the layer's input by `factor` inside the block."""
    hook = layer.register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))
    try:
        yield
    finally:
        hook.remove()


class _OneToken:
    """View of one token that attends to itself."""

    def attend(self, layer, queries_BQTD, keys_BHTD, values_BHTD, scale, mask):
        return attend_to_itself(queries_BQTD, values_BHTD)
