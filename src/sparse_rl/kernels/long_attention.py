"""Causal attention of long packed sequences by cuDNN, forward and backward.

On Hopper and newer GPUs, cuDNN takes two thirds of the time of FlashAttention 2, which torch uses for packed sequences. It
builds a plan for every length, which takes a tenth of a second. Sequences are therefore padded to one of a few lengths, unless
they are so long that a plan costs less than the copies.
"""

# Q query heads, H kv heads, N packed tokens, T tokens of a sequence, D head dimension

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LONG = 4096
"""Number of tokens from which a sequence is long."""
UNPADDED = 32768
"""Number of tokens from which a sequence is not padded."""
LENGTHS_PER_OCTAVE = 8
"""Number of padded lengths per power of two."""


def usable(queries: Tensor, bounds: Sequence[int]) -> bool:
    """Return whether cuDNN supports these queries, and every sequence is long."""
    if not queries.is_cuda or any(stop - start < LONG for start, stop in itertools.pairwise(bounds)):
        return False
    dim, half = queries.shape[-1], queries.dtype in (torch.bfloat16, torch.float16)
    if not half or dim % 8 or dim > 128 or torch.cuda.get_device_capability(queries.device) < (9, 0):
        return False
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


def padded_tokens(tokens: int) -> int:
    """Return the padded length of a long sequence."""
    if tokens >= UNPADDED:
        return tokens
    step = (1 << (tokens.bit_length() - 1)) // LENGTHS_PER_OCTAVE
    return -(-tokens // step) * step


def long_causal_attention(
    queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, bounds: Sequence[int], scale: float
) -> Tensor:
    """Return the attention output [1, Q, N, D] of sequences with these boundaries, each attending only to itself. It is
    differentiable."""
    return _LongAttention.apply(queries_1QND, keys_1HND, values_1HND, bounds, scale)


class _LongAttention(torch.autograd.Function):
    """Attention that saves the packed tensors, as FlashAttention does.

    Padding follows a sequence, so the causal mask hides it, and its outputs have no gradient.
    """

    @staticmethod
    def forward(ctx, queries_1QND, keys_1HND, values_1HND, bounds, scale):
        inputs = (queries_1QND, keys_1HND, values_1HND)
        out_1NQD = torch.empty_like(queries_1QND.transpose(1, 2), memory_format=torch.contiguous_format)
        statistics = []
        for span, parts in _padded_spans(bounds, *inputs):
            out, logsumexp, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *parts, None, True, 0.0, True, False, scale=scale
            )
            out_1NQD[:, span] = out.transpose(1, 2)[:, : span.stop - span.start]
            statistics += [logsumexp, seed, offset]
        ctx.bounds, ctx.scale = bounds, scale
        ctx.save_for_backward(*inputs, out_1NQD, *statistics)
        return out_1NQD.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad_1QND):
        queries_1QND, keys_1HND, values_1HND, out_1NQD, *statistics = ctx.saved_tensors
        inputs = (queries_1QND, keys_1HND, values_1HND)
        grads = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in inputs]
        spans = _padded_spans(ctx.bounds, grad_1QND, *inputs, out_1NQD.transpose(1, 2))
        for number, (span, parts) in enumerate(spans):
            tokens, saved = parts[0].shape[2], statistics[3 * number : 3 * number + 3]
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *parts, *saved, None, None, None, tokens, tokens, 0.0, True, scale=ctx.scale
            )
            for grad_1NHD, part in zip(grads, found, strict=True):
                grad_1NHD[:, span] = part.transpose(1, 2)[:, : span.stop - span.start]
        return *(each.transpose(1, 2) for each in grads), None, None


def _padded_spans(bounds: Sequence[int], *tensors_1HND: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the slice of each sequence and its padded part [1, H, T, D] of each tensor."""
    for start, stop in itertools.pairwise(bounds):
        extra = padded_tokens(stop - start) - (stop - start)
        # in the memory layout [1, N, H, D], as in transformers
        parts = [each.transpose(1, 2)[:, start:stop] for each in tensors_1HND]
        if extra:
            parts = [F.pad(part, (0, 0, 0, 0, 0, extra)) for part in parts]
        yield slice(start, stop), [part.transpose(1, 2) for part in parts]
