"""Sample one token per row from logits with one uniform number per row, and return its exact log-prob."""

# B rows, V vocabulary

import torch
from torch import Tensor

from ..config import Sampling


def sample(logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return tokens [B] and their log-probs [B] under the untruncated softmax at the sampling temperature.

    The draw inverts the cumulative distribution in vocabulary order. The same uniform number gives the same token, independent
    of the other rows. Sums are in float64, so each token's probability stays accurate far into the tail of a 152k vocabulary.
    """
    logprobs_BV = (logits_BV.float() / sampling.logprob_temperature).log_softmax(dim=-1)
    if sampling.temperature == 0:
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        weights_BV = logprobs_BV.exp()
        if sampling.top_k or sampling.top_p < 1:
            weights_BV = truncate(weights_BV, sampling.top_k, sampling.top_p)
        cumulative_BV = weights_BV.double().cumsum(dim=-1)
        target_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
        # right=True: the first token whose cumulative weight exceeds the target, so that a weight of 0 is never drawn.
        tokens_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(-1)
        # out of range only if all logits are NaN; the log-prob below is then NaN
        tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def truncate(weights_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all weights except the `top_k` largest (0: all) and, among those, the smallest set whose probability reaches
    `top_p`. Ties go to lower ids."""
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV[:, top_k:] = 0
    if top_p < 1:
        cumulative_BV = sorted_BV.double().cumsum(dim=-1)
        reached_BV = cumulative_BV[:, :-1] >= top_p * cumulative_BV[:, -1:]
        sorted_BV[:, 1:] = sorted_BV[:, 1:].masked_fill(reached_BV, 0)
    return weights_BV.new_zeros(weights_BV.shape).scatter_(-1, order_BV, sorted_BV)
