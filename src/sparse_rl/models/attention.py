"""Attention of transformers models over our caches: one registered function that calls a view.

A view is any object with `attend(layer, queries, keys, values, scale, mask, form)`. There are views for prompts in prefill, slots
in decode and rollouts in replay. A view is passed as an argument of the model's forward, or inside the keys that a cache returns.
Without a view the function attends as transformers does, so a prepared model behaves as before. `support.py` checks which models
can use it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import UserError
from ..kernels.form import PLAIN, AttentionForm, masked_attention
from .recurrent import view_arguments

NAME = "sparse_rl"
"""Name of the attention implementation, for `model.set_attn_implementation`."""
NO_MASK = (1, 1, 1, 1)
"""Shape of the mask argument. transformers treats a four-dimensional mask as complete and does not build one."""


class AttentionView(Protocol):
    def attend(
        self,
        layer: int,
        queries_BQTD: Tensor,
        keys_BHTD: Tensor,
        values_BHTD: Tensor,
        scale: float,
        mask: Tensor | None,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        """Return the attention output [B, Q, T, D]. Only the view of a transformers cache reads `mask`, for padding."""
        ...


class AttentionProbe(ABC):
    """Base class of a view that also inspects the attention modules."""

    @abstractmethod
    def record_call(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        """Inspect one call of the attention function."""


@dataclass(frozen=True)
class BoundKeys:
    """New keys and values, wrapped for the view of a transformers cache."""

    view: AttentionView
    layer: int
    keys_BHTD: Tensor
    values_BHTD: Tensor

    def to(self, device: Any) -> "BoundKeys":
        """Return the same keys. A layer that reads the keys of an earlier one moves them to its own device."""
        return self

    def __getattr__(self, name: str):
        raise UserError(
            "BoundedCache needs the sparse_rl attention: call model.set_attn_implementation('sparse_rl') first. If it is "
            "already set, this model uses custom attention code and is not supported."
        )


def attention(module, query, key, value, attention_mask, scaling=None, sparse_view=None, **kwargs):
    bound = isinstance(key, BoundKeys)
    if bound:
        if key.layer != module.layer_idx:
            raise UserError(
                f"Layer {module.layer_idx} ({type(module).__name__}) reads the keys of layer {key.layer}, which BoundedCache does "
                "not support: sample with sparse_rl.Engine, or use transformers' DynamicCache."
            )
        sparse_view, key, value = key.view, key.keys_BHTD, key.values_BHTD
    form = AttentionForm(kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sparse_view is None:
        if form.is_plain:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        out_BQTD = masked_attention(query, key, value, _mask(query, key, attention_mask), scale, form)
        return out_BQTD.transpose(1, 2).contiguous(), None
    for name, meaning in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} uses {meaning}, which is not supported: use another model.")
    if not bound and (attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.shape != NO_MASK):
        raise UserError(f"{type(module).__name__} uses a custom attention mask, which is not supported: use another model.")
    if isinstance(sparse_view, AttentionProbe):
        sparse_view.record_call(module, query, key, value, kwargs)
    out_BQTD = sparse_view.attend(module.layer_idx, query, key, value, scale, attention_mask, form)
    return out_BQTD.transpose(1, 2).contiguous(), None


def _mask(query_BQTD: Tensor, key_BHMD: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the boolean mask [B, 1, 1, T, M] of a pass without a view. transformers omits a mask that is causal only."""
    if mask is not None:
        return mask[:, :, None] if mask.dtype == torch.bool else (mask == 0)[:, :, None]
    queries, keys = query_BQTD.shape[2], key_BHMD.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool, device=query_BQTD.device).tril(keys - queries) if queries > 1 else None


UNSUPPORTED = {
    "position_bias": "a position bias",
    "block_indices": "built-in sparse attention",
}

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def run(model: PreTrainedModel, tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView, keep: Tensor | int) -> Tensor:
    """Return the logits [B, n, V] of the tokens in `keep`, with attention computed by the view."""
    return model(**inputs(model, tokens_BT, positions_BT, view), logits_to_keep=keep).logits


def inputs(model: nn.Module, tokens_BT: Tensor, positions_BT: Tensor, view: AttentionView) -> dict[str, Any]:
    """Return the forward arguments of a model or its decoder that select the view for attention and recurrent layers."""
    return {
        "input_ids": tokens_BT,
        "position_ids": positions_BT,
        "attention_mask": tokens_BT.new_empty(NO_MASK, dtype=torch.bool),
        "use_cache": False,
        **view_arguments(model, view),
    }


def attend_to_itself(queries_BQTD: Tensor, values_BHTD: Tensor) -> Tensor:
    """Return the attention output of a single token that attends only to itself."""
    return values_BHTD.repeat_interleave(queries_BQTD.shape[1] // values_BHTD.shape[1], dim=1)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode inside the block and restore their modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
