"""Does this model, through our prefill and decode, say what it says by itself? Asked once, when an engine is built.

The shapes of attention do not tell everything: a model may mix tokens beside attention, or mask in its own way. A few
tokens through both ways do.
"""

import torch
from transformers import PreTrainedModel

from ..errors import UserError
from ..kv.cache import SlotCache
from ..kv.policies import get
from ..kv.settings import KV
from ..models.attention import AttentionLimits, run
from .decode import DecodeView
from .prefill import PromptInSlots, prefill

PROMPT, DECODED = 8, 8
FAR_FLOAT32 = 2e-4  # mean distance of log-probs; rounding gave 1e-5 on a trained model of 135M parameters
FAR_HALF = 0.1  # half precision rounds at every layer
ROUNDING = 10
"""Times what the model, step by step with a cache of its own, differs from itself: large activations (Qwen2.5) magnify
rounding a hundredfold."""


@torch.no_grad()
def check_attention(model: PreTrainedModel, limits: AttentionLimits) -> None:
    """Refuse a model whose log-probs through our views are not its own."""
    total = min([PROMPT + DECODED, *(limit for limit in (limits.context, limits.sliding_window) if limit)])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(limits.vocab, (total,), generator=generator).tolist()
    was_training = model.training
    model.eval()
    try:
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
        own = logits[min(PROMPT, total) - 1 :].float().log_softmax(-1)
        gap = (_through_views(model, limits, tokens).float().log_softmax(-1) - own).abs()
        far = FAR_FLOAT32 if limits.shape.dtype == torch.float32 else FAR_HALF
        if float(gap.mean()) > far:
            stepwise = _step_by_step(model, tokens).float().log_softmax(-1)
            far = max(far, ROUNDING * float((stepwise - own).abs().mean()))
    finally:
        model.train(was_training)
    if float(gap.mean()) > far:
        raise UserError(
            f"{type(model).__name__} does more than attention over cached keys: its log-probs differ by up to "
            f"{float(gap.max()):.2g} when sampled step by step, so it is not supported; use another model."
        )


def _step_by_step(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """The same as `_through_views`, with the cache that the model makes for itself."""
    out = model(torch.tensor([tokens[:PROMPT]], device=model.device), use_cache=True)
    rows = [out.logits[0, -1]]
    for token in tokens[PROMPT:]:
        out = model(torch.tensor([[token]], device=model.device), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def _through_views(model: PreTrainedModel, limits: AttentionLimits, tokens: list[int]) -> torch.Tensor:
    """Logits from the last prompt token on, the rest of the tokens fed one by one."""
    prompt, rest = tokens[:PROMPT], tokens[PROMPT:]
    cache = SlotCache(limits.shape, 1, len(tokens))
    kv = KV(policy="full")
    logits, _ = prefill(model, cache, get("full"), kv, [PromptInSlots(prompt, [0], [0])])
    rows = [logits[0]]
    for number, token in enumerate(rest):
        position = torch.tensor([len(prompt) + number], device=model.device)
        view = DecodeView(cache, position, cache.lengths_S, longest=len(prompt) + number + 1, even=True)
        rows.append(run(model, torch.tensor([[token]], device=model.device), position[:, None], view, keep=1)[0, -1])
        view.advance()
    return torch.stack(rows)
