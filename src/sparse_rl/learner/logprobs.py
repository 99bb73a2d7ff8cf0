"""Compute log-probs, entropies and divergences from hidden states in chunks, without a [tokens, vocabulary] tensor.

The backward pass recomputes the logits of each chunk instead of storing them. Fused cross-entropy kernels (torch's
`linear_cross_entropy`, Liger, cut-cross-entropy) return a loss, but neither entropy nor a divergence between two policies.
They also need a newer torch or Triton. Any of them can replace the matrix product below.
"""

# N tokens, n tokens of a chunk, D hidden dimension, V vocabulary, K quantities per token

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.form import capped
from ..models.compile import fused, fuses
from ..models.head import Head, project
from ..sizes import CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS, LARGE_VOCABULARY


def token_logprobs(head: Head, hidden_ND: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-prob of each target, entropy of its distribution), both [N], at the given temperatures."""
    logprobs_N, entropy_N, _ = _TokenLogprobs.apply(
        (head.scale, head.softcap), head.dtype, hidden_ND, head.weight_VD, head.bias_V, targets_N, temperatures_N
    )
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function for log-probs and entropies.

    With x = scale * logits / temperature, Z = sum exp x and p = exp(x - log Z): the log-prob of y is x_y - log Z and the
    entropy is log Z - sum p x. Their gradients with respect to x are 1[y] - p and -p (log p + entropy). With a soft cap c,
    scale * logits is replaced by y = c * tanh(scale * logits / c), whose derivative is scale * (1 - (y / c)^2).
    """

    @staticmethod
    def forward(ctx, scale_and_cap, dtype, hidden_ND, weight_VD, bias_V, targets_N, temperatures_N):
        ctx.dtype, ctx.scale_and_cap = dtype, scale_and_cap
        scale, softcap = scale_and_cap
        factors_N = (scale if softcap is None else 1.0) / temperatures_N
        statistics = chunk_statistics if softcap is None else capped_statistics(scale, softcap)
        chunks = [
            _of_chunk(statistics, project(hidden_ND[rows], weight_VD, bias_V, dtype), targets_N[rows], factors_N[rows])
            for rows in _chunks(hidden_ND, weight_VD)
        ]
        logprobs_N, entropy_N, log_Z_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, factors_N, entropy_N, log_Z_N)
        ctx.mark_non_differentiable(log_Z_N)
        return logprobs_N, entropy_N, log_Z_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N, _):
        hidden_ND, weight_VD, bias_V, *per_token = ctx.saved_tensors
        per_token += [grad_logprobs_N, grad_entropy_N]
        grads = _HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[2:5])
        gradient = gradient_in(weight_VD.dtype, *ctx.scale_and_cap)
        for rows in _chunks(hidden_ND, weight_VD):
            logits_nV = project(hidden_ND[rows], weight_VD, bias_V, ctx.dtype)
            grads.add(rows, _of_chunk(gradient, logits_nV, *(each[rows] for each in per_token)))
        return None, None, *grads.finish(), None, None


def _of_chunk(function: Callable[..., Any], logits_nV: Tensor, *per_token: Tensor) -> Any:
    def plain(logits_nV: Tensor, *per_token: Tensor) -> Any:
        """Compute in smaller chunks, because this chunk was sized for a compiled kernel and compilation failed."""
        parts = [
            function(*(each[rows] for each in (logits_nV, *per_token))) for rows in _cut(CHUNK_ELEMENTS, *logits_nV.shape)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))

    if _fuses(logits_nV.device, logits_nV.shape[-1]):
        return fused(function, logits_nV, *per_token, plain=plain)
    return plain(logits_nV, *per_token)


def _fuses(device: torch.device, vocab: int) -> bool:
    return vocab >= LARGE_VOCABULARY and fuses(device)


def chunk_statistics(logits_nV: Tensor, targets_n: Tensor, factors_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-prob of the target, entropy, log Z), [n] each."""
    x_nV = _full(logits_nV) * factors_n[:, None]
    log_Z_n = x_nV.logsumexp(dim=-1)
    logprobs_nV = x_nV - log_Z_n[:, None]
    entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(dim=-1)
    chosen_n = _full(logits_nV.gather(-1, targets_n[:, None]).squeeze(-1)) * factors_n
    return chosen_n - log_Z_n, entropy_n, log_Z_n


def chunk_gradient(
    logits_nV: Tensor,
    targets_n: Tensor,
    factors_n: Tensor,
    entropy_n: Tensor,
    log_Z_n: Tensor,
    grad_logprobs_n: Tensor,
    grad_entropy_n: Tensor,
) -> Tensor:
    """Return the gradient with respect to the logits, in float32 or wider."""
    logprobs_nV = _full(logits_nV) * factors_n[:, None] - log_Z_n[:, None]
    p_nV = logprobs_nV.exp()
    is_target_nV = torch.arange(logits_nV.shape[-1], device=logits_nV.device) == targets_n[:, None]
    grad_nV = grad_logprobs_n[:, None] * (is_target_nV.to(p_nV.dtype) - p_nV)
    grad_nV = grad_nV - grad_entropy_n[:, None] * p_nV * (logprobs_nV + entropy_n[:, None])
    return grad_nV * factors_n[:, None]


@cache
def capped_statistics(scale: float, softcap: float) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return `chunk_statistics` for logits that are scaled and soft-capped first."""
    return lambda logits_nV, *per_token: chunk_statistics(capped(_full(logits_nV) * scale, softcap), *per_token)


@cache
def gradient_in(dtype: torch.dtype, scale: float = 1.0, softcap: float | None = None) -> Callable[..., Tensor]:
    """Return `chunk_gradient` with its result cast to the dtype, so that a fused kernel writes it in that dtype. With a soft cap,
    the gradient is with respect to the logits before they are scaled and capped."""
    if softcap is None:
        return lambda *tensors: chunk_gradient(*tensors).to(dtype)

    def of_capped(logits_nV: Tensor, *per_token: Tensor) -> Tensor:
        capped_nV = capped(_full(logits_nV) * scale, softcap)
        return (chunk_gradient(capped_nV, *per_token) * _slope(capped_nV, scale, softcap)).to(dtype)

    return of_capped


def _slope(logits_nV: Tensor, scale: float, softcap: float | None) -> Tensor | float:
    """Return the derivative of scaled and soft-capped logits."""
    return scale if softcap is None else scale * (1 - (logits_nV / softcap).square())


def divergence(
    head: Head, student_ND: Tensor, teacher_ND: Tensor, temperatures_N: Tensor, *, kind: str = "kl", top: int | None = None
) -> Tensor:
    """Return KL(student || teacher) per token, [N]. For kind `jsd`, return the mean KL of both distributions to their mixture.

    The gradient flows only through the student. `top` compares only the teacher's `top` most likely tokens and merges all
    others into one. The result is then a lower bound that gets tighter as `top` grows.
    """

    def of_chunk(logits_nV: Tensor, teacher_nD: Tensor, temperatures_n: Tensor) -> Tensor:
        student = (logits_nV / temperatures_n[:, None]).log_softmax(dim=-1)
        with torch.no_grad():
            teacher_nV = _logits(  # same rounding as for the student
                teacher_nD, head.weight_VD, head.bias_V, (head.scale, head.softcap), head.dtype
            )
            teacher = (teacher_nV / temperatures_n[:, None]).log_softmax(dim=-1)
        if top is not None and top < student.shape[-1]:
            best = teacher.topk(top, dim=-1).indices
            student, teacher = (_merge_rest(logprobs, best) for logprobs in (student, teacher))
        if kind == "kl":
            return (student.exp() * (student - teacher)).sum(dim=-1)[None]
        middle = torch.logaddexp(student, teacher) - math.log(2)
        return 0.5 * (student.exp() * (student - middle) + teacher.exp() * (teacher - middle)).sum(dim=-1)[None]

    return in_chunks(of_chunk, head, student_ND, teacher_ND.detach(), temperatures_N)[0]


def _merge_rest(logprobs_nV: Tensor, chosen_nk: Tensor) -> Tensor:
    chosen = logprobs_nV.gather(-1, chosen_nk)
    rest = logprobs_nV.scatter(-1, chosen_nk, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([chosen, rest.clamp(min=-80)], dim=-1)  # the rest is -inf if no token is left


def in_chunks(of_chunk: Callable[..., Tensor], head: Head, hidden_ND: Tensor, *per_token: Tensor) -> Tensor:
    """Apply `of_chunk(logits_nV, *per_token_n) -> [K, n]` to all tokens in chunks and return [K, N]. The result is
    differentiable with respect to the hidden states and the LM head."""
    scale_and_cap = (head.scale, head.softcap)
    return _InChunks.apply(of_chunk, scale_and_cap, head.dtype, hidden_ND, head.weight_VD, head.bias_V, *per_token)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of_chunk, scale_and_cap, dtype, hidden_ND, weight_VD, bias_V, *per_token):
        ctx.of_chunk, ctx.scale_and_cap, ctx.dtype = of_chunk, scale_and_cap, dtype
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, *per_token)
        parts = [
            of_chunk(_logits(hidden_ND[rows], weight_VD, bias_V, scale_and_cap, dtype), *(each[rows] for each in per_token))
            for rows in _chunks(hidden_ND, weight_VD, fusible=False)
        ]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad_KN):
        hidden_ND, weight_VD, bias_V, *per_token = ctx.saved_tensors
        grads = _HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[3:6])
        for rows in _chunks(hidden_ND, weight_VD, fusible=False):
            with torch.enable_grad():
                logits_nV = _logits(hidden_ND[rows], weight_VD, bias_V, ctx.scale_and_cap, ctx.dtype).detach().requires_grad_()
                values_Kn = ctx.of_chunk(logits_nV, *(each[rows] for each in per_token))
            (grad_logits_nV,) = torch.autograd.grad(values_Kn, logits_nV, grad_KN[:, rows])
            slope = _slope(logits_nV.detach(), *ctx.scale_and_cap)
            grads.add(rows, (grad_logits_nV * slope).to(weight_VD.dtype))
        return None, None, None, *grads.finish(), *(None for _ in per_token)


class _HeadGradients:
    """Gradients of hidden states, weight and bias, computed chunk by chunk. Sums over chunks are in float32 or wider."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: tuple[bool, bool, bool]):
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        self.hidden_ND, self.weight_VD, self.bias_V = hidden_ND, weight_VD, bias_V
        self.grad_hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        self.grad_weight = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
        self.grad_bias = torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None

    def add(self, rows: slice, grad_logits_nV: Tensor) -> None:
        if self.grad_hidden is not None:
            self.grad_hidden[rows] = grad_logits_nV @ self.weight_VD
        if self.grad_weight is not None:
            _add_product(self.grad_weight, grad_logits_nV.T, self.hidden_ND[rows])
        if self.grad_bias is not None:
            self.grad_bias += grad_logits_nV.sum(dim=0)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (
            self.grad_hidden,
            None if self.grad_weight is None else self.grad_weight.to(self.weight_VD.dtype),
            None if self.grad_bias is None or self.bias_V is None else self.grad_bias.to(self.bias_V.dtype),
        )


def _add_product(sum_VD: Tensor, left_Vn: Tensor, right_nD: Tensor) -> None:
    """Add left @ right to the sum in place. On CUDA the product is not rounded to half precision first."""
    if sum_VD.is_cuda and sum_VD.dtype != left_Vn.dtype:
        torch.addmm(sum_VD, left_Vn, right_nD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += left_Vn @ right_nD


def _chunks(hidden_ND: Tensor, weight_VD: Tensor, *, fusible: bool = True) -> list[slice]:
    fusible = fusible and _fuses(hidden_ND.device, len(weight_VD))
    return _cut(FUSED_CHUNK_ELEMENTS if fusible else CHUNK_ELEMENTS, len(hidden_ND), len(weight_VD))


def _cut(elements: int, tokens: int, vocab: int) -> list[slice]:
    size = max(1, elements // vocab)
    if size > 128:
        size -= size % 128  # multiple of the tile size of matrix products
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(
    hidden_nD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    scale_and_cap: tuple[float, float | None],
    dtype: torch.dtype | None,
) -> Tensor:
    scale, softcap = scale_and_cap
    return capped(_full(project(hidden_nD, weight_VD, bias_V, dtype)) * scale, softcap)


def _full(tensor: Tensor) -> Tensor:
    """Cast to float32, unless the dtype is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
