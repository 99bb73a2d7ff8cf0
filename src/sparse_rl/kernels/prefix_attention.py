"""Causal attention of packed sequences that share prefixes: a prompt is computed once for all samples of its group.

A segment is a run of packed tokens. Its queries see the keys of its prefix, which is an earlier run of packed tokens, and its
own keys up to themselves.
"""

# Q query heads, H kv heads, N packed tokens, M keys of all segments with their prefixes, n queries and m keys of a segment,
# D head dimension

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import causal_attention, has_varlen, repeated_if_needed, varlen_causal_attention
from .form import PLAIN, AttentionForm, last_tokens_masked
from .upload import upload

SUMMED_ROWS = 8192
"""Number of rows of a gradient that are widened to float32 at a time."""


@dataclass(frozen=True)
class Segment:
    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0

    @property
    def queries(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        """Number of keys of the prefix and of the segment."""
        return self.prefix_stop - self.prefix_start + self.queries


class PrefixAttention:
    """Attention of one row of segments, which cover the row in order."""

    def __init__(self, segments: Sequence[Segment], device: torch.device):
        self.segments = segments
        runs = [run for each in segments for run in ((each.prefix_start, each.prefix_stop), (each.start, each.stop))]
        self.keys_M = upload(torch.cat([torch.arange(*run) for run in runs]), device)
        self.query_bounds, self.key_bounds = (
            upload(torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), device)
            for counts in ([each.queries for each in segments], [each.keys for each in segments])
        )
        self.most_queries = max(each.queries for each in segments)
        self.most_keys = max(each.keys for each in segments)

    def attend(
        self, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, scale: float, form: AttentionForm = PLAIN
    ) -> Tensor:
        """Return the attention output [1, Q, N, D]. It is differentiable.

        In half precision on a GPU, one kernel computes all segments. Otherwise each segment is a separate call.
        """
        form, packed = form.within(self.most_keys), (queries_1QND, keys_1HND, values_1HND)
        if not has_varlen(queries_1QND, form):
            outputs = [self._attend_segment(each, *packed, scale, form) for each in self.segments]
            return torch.cat(outputs, dim=2)
        keys_MHD, values_MHD = (_Repeat.apply(each[0].transpose(0, 1), self.keys_M) for each in (keys_1HND, values_1HND))
        queries_NQD, most = queries_1QND[0].transpose(0, 1), (self.most_queries, self.most_keys)
        inputs = (queries_NQD, keys_MHD, values_MHD, self.query_bounds, self.key_bounds)
        out_NQD = varlen_causal_attention(*inputs, *most, scale, form.window)
        return out_NQD.transpose(0, 1)[None]

    def _attend_segment(
        self, segment: Segment, queries_1QND: Tensor, keys_1HND: Tensor, values_1HND: Tensor, scale: float, form: AttentionForm
    ) -> Tensor:
        own, prefix = slice(segment.start, segment.stop), slice(segment.prefix_start, segment.prefix_stop)
        if segment.keys == segment.queries:
            part = (each[:, :, own] for each in (queries_1QND, keys_1HND, values_1HND))
            return causal_attention(*part, scale=scale, form=form)
        keys_1HmD, values_1HmD = (torch.cat([each[:, :, prefix], each[:, :, own]], dim=2) for each in (keys_1HND, values_1HND))
        return last_tokens_attention(queries_1QND[:, :, own], keys_1HmD, values_1HmD, scale, form)


def last_tokens_attention(
    queries_1QnD: Tensor, keys_1HmD: Tensor, values_1HmD: Tensor, scale: float, form: AttentionForm = PLAIN
) -> Tensor:
    """Return the causal attention output [1, Q, n, D] of the last n of m tokens. It is differentiable."""
    n, m = queries_1QnD.shape[2], keys_1HmD.shape[2]
    form = form.within(m)
    if has_varlen(queries_1QnD, form):
        q, k, v = (each[0].transpose(0, 1) for each in (queries_1QnD, keys_1HmD, values_1HmD))
        of_queries, of_keys = (upload(torch.tensor([0, count], dtype=torch.int32), q.device) for count in (n, m))
        return varlen_causal_attention(q, k, v, of_queries, of_keys, n, m, scale, form.window).transpose(0, 1)[None]
    if n == m:
        return causal_attention(queries_1QnD, keys_1HmD, values_1HmD, scale=scale, form=form)
    if form.is_plain:
        keys_1HmD, values_1HmD = repeated_if_needed(queries_1QnD, keys_1HmD, values_1HmD)
    return last_tokens_masked(queries_1QnD, keys_1HmD, values_1HmD, scale, form)


class _Repeat(torch.autograd.Function):
    """Select rows, some of them several times. The gradient sums over equal rows in float32."""

    @staticmethod
    def forward(ctx, packed_NHD, rows_M):
        ctx.save_for_backward(rows_M)
        ctx.shape = packed_NHD.shape
        return packed_NHD.index_select(0, rows_M)

    @staticmethod
    def backward(ctx, grad_MHD):
        (rows_M,) = ctx.saved_tensors
        sums_NHD = torch.zeros(ctx.shape, dtype=torch.float32, device=grad_MHD.device)
        for rows, grads in zip(rows_M.split(SUMMED_ROWS), grad_MHD.split(SUMMED_ROWS), strict=True):
            sums_NHD.index_add_(0, rows, grads.float())
        return sums_NHD.to(grad_MHD.dtype), None
