"""Log-probs, entropy and divergence of tokens from hidden states, in chunks: no [tokens, vocabulary] tensor exists.

Backward computes a chunk's logits again instead of keeping them. Our own few lines and not a library's kernel: fused
cross-entropies (torch's `linear_cross_entropy`, Liger, cut-cross-entropy) give a loss, not entropy or a divergence between
two policies, and either need a newer torch or Triton; any of them can stand in for the product below.
"""

# N tokens, n tokens of a chunk, D hidden dimension, V vocabulary, K quantities per token

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.head import Head

CHUNK_ELEMENTS = 2**26
"""Of a chunk's logits: 256 MiB in float32, some four times that with what is computed from them."""


def token_logprobs(head: Head, hidden_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), both [N], at the given temperatures."""

    def of_chunk(logits_nV: Tensor, targets_n: Tensor, temperatures_n: Tensor) -> Tensor:
        logprobs_nV = (logits_nV / temperatures_n[:, None]).log_softmax(dim=-1)
        entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(dim=-1)
        return torch.stack([logprobs_nV.gather(-1, targets_n[:, None]).squeeze(-1), entropy_n])

    logprobs_N, entropy_N = in_chunks(of_chunk, head, hidden_ND, targets_N, temperatures_N)
    return logprobs_N, entropy_N


def divergence(
    head: Head, student_ND: Tensor, teacher_ND: Tensor, temperatures_N: Tensor, *, kind: str = "kl", top: int | None = None
) -> Tensor:
    """KL(student || teacher) per token, [N], or with kind `jsd` the mean of both to their midpoint.

    The gradient flows through the student alone. `top` compares only the teacher's most likely tokens one by one and
    everything else as one lump: a lower bound that tightens as `top` grows.
    """

    def of_chunk(logits_nV: Tensor, teacher_nD: Tensor, temperatures_n: Tensor) -> Tensor:
        student = (logits_nV / temperatures_n[:, None]).log_softmax(dim=-1)
        with torch.no_grad():
            teacher = (_full(head(teacher_nD)) / temperatures_n[:, None]).log_softmax(dim=-1)
        if top is not None and top < student.shape[-1]:
            best = teacher.topk(top, dim=-1).indices
            student, teacher = (_lump_rest(logprobs, best) for logprobs in (student, teacher))
        if kind == "kl":
            return (student.exp() * (student - teacher)).sum(dim=-1)[None]
        middle = torch.logaddexp(student, teacher) - math.log(2)
        return 0.5 * (student.exp() * (student - middle) + teacher.exp() * (teacher - middle)).sum(dim=-1)[None]

    return in_chunks(of_chunk, head, student_ND, teacher_ND.detach(), temperatures_N)[0]


def _lump_rest(logprobs_nV: Tensor, chosen_nk: Tensor) -> Tensor:
    chosen = logprobs_nV.gather(-1, chosen_nk)
    rest = logprobs_nV.scatter(-1, chosen_nk, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([chosen, rest.clamp(min=-80)], dim=-1)  # a rest of nothing weighs nothing


def in_chunks(of_chunk: Callable[..., Tensor], head: Head, hidden_ND: Tensor, *per_token: Tensor) -> Tensor:
    """`of_chunk(logits_nV, *per_token_n) -> [K, n]` for all tokens, [K, N], differentiable in hidden states and head."""
    return _InChunks.apply(of_chunk, head.scale, hidden_ND, head.weight_VD, head.bias_V, *per_token)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of_chunk, scale, hidden_ND, weight_VD, bias_V, *per_token):
        ctx.of_chunk, ctx.scale = of_chunk, scale
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, *per_token)
        parts = [
            of_chunk(_logits(hidden_ND[rows], weight_VD, bias_V, scale), *(each[rows] for each in per_token))
            for rows in _chunks(len(hidden_ND), len(weight_VD))
        ]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad_KN):
        hidden_ND, weight_VD, bias_V, *per_token = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[2:5]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        wide = torch.promote_types(weight_VD.dtype, torch.float32)  # sums over chunks are not rounded in between
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for rows in _chunks(len(hidden_ND), len(weight_VD)):
            with torch.enable_grad():
                logits_nV = _logits(hidden_ND[rows], weight_VD, bias_V, ctx.scale).detach().requires_grad_()
                values_Kn = ctx.of_chunk(logits_nV, *(each[rows] for each in per_token))
            (grad_logits_nV,) = torch.autograd.grad(values_Kn, logits_nV, grad_KN[:, rows])
            grad_logits_nV = (grad_logits_nV * ctx.scale).to(weight_VD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits_nV @ weight_VD
            if grad_weight is not None:
                grad_weight += grad_logits_nV.T @ hidden_ND[rows]
            if grad_bias is not None:
                grad_bias += grad_logits_nV.sum(dim=0)
        return (
            None,
            None,
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            *(None for _ in per_token),
        )


def _chunks(tokens: int, vocab: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(hidden_nD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    return _full(F.linear(hidden_nD, weight_VD, bias_V)) * scale


def _full(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
