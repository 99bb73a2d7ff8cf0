"""Packed rows: the blocks that FlexAttention skips, its numbers and gradients, against plain masked attention."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from sparse_rl.kernels import shadow
from sparse_rl.kernels.attention import causal_attention, packed_causal_attention
from sparse_rl.kernels.form import AttentionForm
from sparse_rl.kernels.long_attention import LONG, UNPADDED, padded_tokens
from sparse_rl.kernels.shadow import Shadow, block_relations
from sparse_rl.kv.trace import NEVER
from sparse_rl.learner import replay
from sparse_rl.learner.replay import ReplayView, Span, packed_until
from sparse_rl.sizes import SHADOW_BLOCK as BLOCK
from sparse_rl.sizes import padded_length

LAYERS, Q, H, D = 2, 4, 2, 16


def spans_of(lengths, seed=0, whole=()):
    """Rollouts whose keys are evicted at random times, but for those named in `whole`."""
    generator = torch.Generator().manual_seed(seed)
    spans, start = [], 0
    for index, length in enumerate(lengths):
        born = torch.arange(length)
        evicted_at = born + 1 + torch.randint(length, (LAYERS, H, length), generator=generator)
        kept = torch.rand(LAYERS, H, length, generator=generator) < 0.2
        evicted_at = torch.where(kept, torch.tensor(NEVER), evicted_at).to(torch.int32)
        spans.append(Span(start, start + length, None if index in whole else evicted_at))
        start += length
    return spans


def inputs(tokens, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, tokens, D, generator=generator).to(dtype).requires_grad_() for heads in (Q, H, H)]


def visible(spans, layer):
    """[Q, N, N], by the definition, one rollout at a time."""
    sees = torch.zeros(Q, spans[-1].stop, spans[-1].stop, dtype=torch.bool)
    for span in spans:
        time = torch.arange(span.stop - span.start)
        causal = (time <= time[:, None]).expand(H, -1, -1)
        if span.evicted_at_LHT is not None:
            causal = causal & (time[:, None] < span.evicted_at_LHT[layer][:, None])
        sees[:, span.start : span.stop, span.start : span.stop] = causal.repeat_interleave(Q // H, dim=0)
    return sees


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention's own unfused form, which reads the whole mask and no blocks. It refuses gradients on a CPU, where its
    compiled form has none, but can compute them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(shadow, "_compiled", lambda: shadow._flex)
    monkeypatch.setattr(shadow, "usable", lambda queries: True)


@pytest.mark.parametrize("lengths", [[300], [40, 260, 130], [128, 256], [1, 2, 200]])
def test_a_packed_row_sees_what_its_rollouts_saw(lengths):
    spans = spans_of(lengths, whole=(1,))
    made = Shadow(packed_until(spans))
    for layer in range(LAYERS):
        mask = create_mask(made.block_mask(layer, Q).mask_mod, 1, Q, made.padded, made.padded, device="cpu")[0]
        expected = torch.zeros_like(mask)
        expected[:, : made.tokens, : made.tokens] = visible(spans, layer)
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("lengths", [[300], [40, 260, 130], [128, 256], [700]])
def test_blocks_are_skipped_only_if_nothing_in_them_is_seen(lengths):
    spans = spans_of(lengths, whole=(1,))
    made = Shadow(packed_until(spans))
    some, every = block_relations(made.until_LHP)
    for layer in range(LAYERS):
        sees = torch.zeros(Q, made.padded, made.padded, dtype=torch.bool)
        sees[:, : made.tokens, : made.tokens] = visible(spans, layer)
        blocks = sees[:: Q // H].unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).transpose(2, 3)  # H, B, B, 128, 128
        assert bool((some[layer] >= blocks.flatten(3).any(-1)).all())
        assert bool((every[layer] <= blocks.flatten(3).all(-1)).all())
        assert not bool(some[layer].triu(1).any())
        mask = made.block_mask(layer, Q)
        dense = mask.to_dense()[0].bool()
        assert torch.equal(dense, some[layer].repeat_interleave(Q // H, dim=0))
        _check_lists(mask, some[layer] & ~every[layer], every[layer])


def _check_lists(mask, partial_HBB, full_HBB):
    """The lists by query and by key name the same blocks."""
    groups = Q // H
    for chosen, by_query, by_key in (
        (partial_HBB, (mask.kv_num_blocks, mask.kv_indices), (mask.q_num_blocks, mask.q_indices)),
        (full_HBB, (mask.full_kv_num_blocks, mask.full_kv_indices), (mask.full_q_num_blocks, mask.full_q_indices)),
    ):
        for relation, (counts, indices) in ((chosen, by_query), (chosen.transpose(1, 2), by_key)):
            for head in range(Q):
                for row, wanted in enumerate(relation[head // groups]):
                    listed = indices[0, head, row, : counts[0, head, row]].tolist()
                    assert listed == torch.nonzero(wanted).flatten().tolist()


def test_evicted_and_distant_blocks_are_skipped():
    length = 8 * BLOCK
    evicted_at = (torch.arange(length) + 1 + 2 * BLOCK).expand(LAYERS, H, -1).to(torch.int32)
    some, _ = block_relations(packed_until([Span(0, length, evicted_at)]))
    assert int(some[0, 0].sum()) == 8 + 7 + 6  # a band: the diagonal and the two blocks before it


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("lengths", [[300], [40, 260, 130], [128, 128]])
def test_flex_attention_is_masked_attention_forward_and_backward(lengths):
    spans = spans_of(lengths, whole=(1,))
    view = ReplayView(spans)
    for layer in range(LAYERS):
        ours, theirs = inputs(sum(lengths)), inputs(sum(lengths))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="FlexAttention is not available")
            out = view.attend(layer, *ours, 0.3, None)
        expected = view._one_by_one(packed_until(spans)[layer], *theirs, 0.3)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        for got, wanted in zip(
            torch.autograd.grad((out * weights).sum(), ours),
            torch.autograd.grad((expected * weights).sum(), theirs),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (None, True), (0.7, True)])
@pytest.mark.parametrize("whole", [(), (0, 1, 2)], ids=["evicted", "kept"])
def test_flex_attention_caps_logits_and_adds_sinks(monkeypatch, window, softcap, has_sinks, whole):
    """Within windows, from which nothing is evicted, and in layers that see all: forward and backward, sinks included."""
    lengths = [40, 260, 130]
    found = []
    for usable in (True, False):
        monkeypatch.setattr(shadow, "usable", lambda queries, usable=usable: usable)
        tensors, sinks = inputs(sum(lengths)), torch.linspace(-1, 1, Q).requires_grad_()
        form = AttentionForm(window, softcap, sinks if has_sinks else None)
        out = ReplayView(spans_of(lengths, whole=whole)).attend(1, *tensors, 0.3, None, form)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        leaves = [*tensors, sinks] if has_sinks else tensors
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
def test_a_pack_without_evictions_is_the_dense_one_to_the_bit():
    lengths = [40, 90]
    tensors = inputs(sum(lengths))
    sparse, dense = ReplayView(spans_of(lengths, whole=(0, 1))), ReplayView([Span(0, 40, None), Span(40, 130, None)])
    assert torch.equal(sparse.attend(0, *tensors, 0.3, None), dense.attend(0, *tensors, 0.3, None))


def test_one_compilation_serves_all_layers_and_packs_of_like_length():
    """Traced as on a GPU, run by a backend that compiles nothing."""
    torch._dynamo.reset()
    compilations = []

    def count(graph, example):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(shadow._flex, fullgraph=True, dynamic=False, backend=count)
    for lengths in ([300], [40, 260, 130], [290, 200]):
        made = Shadow(packed_until(spans_of(lengths)))
        for layer in range(LAYERS):
            q, k, v = (torch.randn(1, heads, made.padded, D) for heads in (Q, H, H))
            out = compiled(q, k, v, made.block_mask(layer, Q), 0.25)
            torch.testing.assert_close(
                out, flex_attention(q, k, v, block_mask=made.block_mask(layer, Q), scale=0.25, enable_gqa=True)
            )
    assert len(compilations) == 1


def test_without_a_compiler_the_shadow_is_masked_and_said_once(monkeypatch):
    monkeypatch.setattr(shadow, "_broken", [])
    monkeypatch.setattr(shadow, "usable", lambda queries: not shadow._broken)

    def fails(*args):
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand a long trace")

    monkeypatch.setattr(shadow, "_compiled", lambda: fails)
    spans = spans_of([30, 50])
    view, tensors = replay.ReplayView(spans), inputs(80)
    with pytest.warns(UserWarning, match="FlexAttention is not available.*TorchDynamoException: no compiler") as warned:
        outputs = [view.attend(layer, *tensors, 0.3, None) for layer in range(LAYERS)]
    assert len(warned) == 1 and "trace" not in str(warned[0].message)
    for layer, out in enumerate(outputs):
        torch.testing.assert_close(out, view._one_by_one(packed_until(spans)[layer], *tensors, 0.3))


def test_packed_causal_attention_is_that_of_each_sequence():
    q, k, v = inputs(90)
    bounds = torch.tensor([0, 30, 31, 90], dtype=torch.int32)
    out = packed_causal_attention(q, k, v, bounds, 59, 0.3)
    for start, stop in ((0, 30), (30, 31), (31, 90)):
        alone = causal_attention(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], scale=0.3)
        assert torch.equal(out[:, :, start:stop], alone)


def test_lengths_are_rounded_up_to_few_values():
    assert [padded_length(tokens) for tokens in (1, 128, 129, 4352, 16384)] == [128, 128, 256, 8192, 16384]


def test_padded_lengths_are_few_and_waste_little():
    assert all(0 <= padded_tokens(n) - n < n / 8 for n in range(LONG, 40_000))
    assert len({padded_tokens(n) for n in range(LONG, UNPADDED)}) <= 3 * 8 + 1
    assert padded_tokens(40_001) == 40_001
