"""A decode step over codes: the kernel stores and reads what the torch reference does."""

import pytest
import torch

from sparse_rl import sizes
from sparse_rl.config import KV
from sparse_rl.kernels.attention import attention_part, decode_attention, merged_parts, prompt_attention
from sparse_rl.kernels.code_attention import attend_and_append_codes
from sparse_rl.kernels.decode_codes import fused_decode
from sparse_rl.kernels.form import PLAIN, AttentionForm
from sparse_rl.kernels.prompt_readers import members_of, prompt_readers
from sparse_rl.kernels.rows import StoredCodes, gathered_prompts
from sparse_rl.kv.quantize import channel_range
from sparse_rl.kv.storage import KeyScales, Quantiser, Stored

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]


def keys_of(*shape):
    """Keys of channels that differ in size and bias, as those of Qwen2.5 do."""
    size = torch.logspace(-1, 1, shape[-1], device=DEVICE)
    return torch.randn(*shape, device=DEVICE) * size + 10 * size.flip(0)


def quantiser_of(name, heads, dim, form=PLAIN):
    return Quantiser(name, KeyScales.of([channel_range(keys_of(2, heads, 300, dim))]), with_centre=not form.is_plain)


def form_of(kind, q_heads):
    """Soft caps and sinks depend on the centre of keys, which is large here."""
    sinks = 3 * torch.randn(q_heads, device=DEVICE) if "sinks" in kind else None
    return AttentionForm(None, 20.0 if "capped" in kind else None, sinks)


@pytest.mark.parametrize("name", ["8bit", "4bit"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "splits", "dtype", "kind"),
    [
        *((6, 2, 64, 3, dtype, "") for dtype in DTYPES),
        *((4, 4, 24, 1, torch.bfloat16, ""), (12, 2, 128, 1, torch.float32, ""), (4, 1, 16, 3, torch.float32, "")),
        (4, 1, 16, 1, torch.float32, "sinks"),
        (9, 1, 144, 1, torch.bfloat16, "capped sinks"),  # two warps, and more query heads than a program has
    ],
)
def test_a_step_appends_codes_and_attends_to_them(q_heads, kv_heads, dim, name, splits, dtype, kind):
    torch.manual_seed(0)
    slots, capacity, window = 4, 200, 5
    lengths = torch.tensor([0, 1, 130, 199], device=DEVICE)
    positions = lengths + torch.tensor([3, 7, 1000, 4], device=DEVICE)
    form = form_of(kind, q_heads)
    quantiser = quantiser_of(name, kv_heads, dim, form)
    cached = quantiser.encode(
        0, keys_of(slots, kv_heads, capacity, dim), torch.randn(slots, kv_heads, capacity, dim, device=DEVICE)
    )
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.randn(slots, q_heads, window, dim, device=DEVICE).to(dtype)
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    key, value = keys_of(slots, kv_heads, dim).to(dtype), torch.randn(slots, kv_heads, dim, device=DEVICE).to(dtype)
    new = quantiser.encode(0, key[:, :, None], value[:, :, None])
    expected, expected_ring = cached.map(torch.clone), ring.clone()
    for slot, (length, position) in enumerate(zip(lengths.tolist(), positions.tolist(), strict=True)):
        for tensor, each in zip(expected, new, strict=True):
            tensor[slot, :, length] = each[slot, :, 0]
        expected_ring[slot, :, position % window] = query[slot]
    restored = quantiser.decode(0, expected, torch.float32)
    out = decode_attention(query.float(), *restored, lengths + 1, longest=capacity, even=False, scale=0.05, form=form)
    scales = (each[0] for each in quantiser.scales)
    ours = attend_and_append_codes(
        *(query, key, value, cached, places, ring, lengths, positions, *scales), scale=0.05, splits=splits, form=form
    )
    torch.testing.assert_close(ours.float(), out, **({} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}))
    for mine, theirs in zip(cached, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(ring, expected_ring)
    assert [places[slot, 0, length].item() for slot, length in enumerate(lengths.tolist())] == positions.tolist()


@pytest.mark.parametrize("channels", [16, 32])
def test_a_group_may_have_16_or_32_channels(channels, monkeypatch):
    monkeypatch.setattr(sizes, "GROUP_CHANNELS", channels)
    test_a_step_appends_codes_and_attends_to_them(6, 2, 128, "4bit", 1, torch.float32, "")
    test_codes_of_rows_of_several_layers_are_decoded("4bit", 128, torch.float32)
    assert quantiser_of("4bit", 2, 128).layout() == (torch.uint8, 64, 128 // channels)


@pytest.mark.parametrize(
    ("name", "q_heads", "kv_heads", "dim", "splits", "dtype", "kind"),
    [
        ("8bit", 6, 2, 64, 1, torch.float32, ""),
        ("8bit", 2, 1, 132, 3, torch.bfloat16, ""),
        ("8bit", 34, 2, 16, 2, torch.bfloat16, ""),  # three programs for a kv head
        ("4bit", 2, 2, 24, 7, torch.float32, ""),
        *((name, 2, 1, 16, 2, torch.float32, "capped sinks") for name in ("8bit", "4bit")),
    ],
)
def test_a_step_reads_the_stored_prompt_and_the_slot(q_heads, kv_heads, dim, name, splits, dtype, kind):
    """Prompts in scattered pages, two of them shared, of one token, of full pages and of many."""
    torch.manual_seed(0)
    slots, capacity, pages, page = 5, 200, 12, 64
    lengths = torch.tensor([0, 1, 130, 199, 64], device=DEVICE)
    prompts = torch.tensor([1, 200, 200, 128, 63], device=DEVICE)
    table = torch.tensor([[7, 0, 0, 0], [3, 11, 1, 9], [3, 11, 1, 9], [2, 8, 0, 0], [5, 0, 0, 0]], device=DEVICE)
    form = form_of(kind, q_heads)
    quantiser = quantiser_of(name, kv_heads, dim, form)
    stored = quantiser.encode(0, keys_of(pages, kv_heads, page, dim), torch.randn(pages, kv_heads, page, dim, device=DEVICE))
    cached = quantiser.encode(
        0, keys_of(slots, kv_heads, capacity, dim), torch.randn(slots, kv_heads, capacity, dim, device=DEVICE)
    )
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    key, value = keys_of(slots, kv_heads, dim).to(dtype), torch.randn(slots, kv_heads, dim, device=DEVICE).to(dtype)
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.zeros(slots, q_heads, 0, dim, dtype=dtype, device=DEVICE)
    ours = attend_and_append_codes(
        *(query, key, value, cached, places, ring, lengths, prompts + lengths, *(each[0] for each in quantiser.scales)),
        scale=0.05,
        splits=splits,
        prompts=StoredCodes(stored, table.int(), prompts),
        form=form,
    )

    def read(pages_nP, tokens):
        return quantiser.decode(0, stored.map(lambda each: gathered_prompts(each, pages_nP, tokens)), torch.float32)

    scaled = {"scale": 0.05, "softcap": form.softcap}
    own = attention_part(query, *quantiser.decode(0, cached, torch.float32), lengths + 1, **scaled)
    expected = merged_parts(prompt_attention(query, table, prompts, read, **scaled), own, sinks_Q=form.sinks_Q)
    torch.testing.assert_close(ours.float(), expected, **({} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}))


@pytest.mark.parametrize(
    ("name", "q_heads", "kv_heads", "dim", "splits", "kind"),
    [
        ("8bit", 6, 2, 64, 1, ""),
        ("8bit", 2, 2, 24, 3, "capped sinks"),
        ("8bit", 9, 1, 132, 1, ""),
        ("4bit", 6, 2, 128, 1, ""),
        ("4bit", 2, 2, 24, 3, "capped sinks"),
        ("4bit", 40, 2, 16, 2, ""),
    ],
)
def test_a_prompt_of_codes_is_read_once_for_the_slots_that_share_it(name, q_heads, kv_heads, dim, splits, kind):
    """Groups within a program and across two, a slot with its own prompt, and one that has ended, whose page belongs to another
    group by now."""
    torch.manual_seed(0)
    slots, capacity, page = 19, 70, 64
    prompts = torch.tensor([130] * 9 + [64] + [7] * 8 + [0], device=DEVICE)
    table = torch.tensor([[3, 11, 1]] * 9 + [[5, 0, 0]] + [[2, 0, 0]] * 8 + [[3, 8, 0]], device=DEVICE).int()
    mixed = torch.cat([torch.randperm(18), torch.tensor([18])]).to(DEVICE)  # a program reads the pages of its last slot
    prompts, table = prompts[mixed], table[mixed]
    form = form_of(kind, q_heads)
    quantiser = quantiser_of(name, kv_heads, dim, form)
    stored, cached = (
        quantiser.encode(0, keys_of(rows, kv_heads, tokens, dim), torch.randn(rows, kv_heads, tokens, dim, device=DEVICE))
        for rows, tokens in ((12, page), (slots, capacity))
    )
    query = torch.randn(slots, q_heads, dim, device=DEVICE).bfloat16()
    key = keys_of(slots, kv_heads, dim).bfloat16()
    value = torch.randn(slots, kv_heads, dim, device=DEVICE).bfloat16()
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.zeros(slots, q_heads, 0, dim, dtype=torch.bfloat16, device=DEVICE)
    lengths = torch.randint(capacity, (slots,), device=DEVICE)
    state = (query, key, value, cached, places, ring, lengths, prompts + lengths, *(each[0] for each in quantiser.scales))
    alone, once = (
        attend_and_append_codes(
            *state, scale=0.05, splits=splits, prompts=StoredCodes(stored, table, prompts, readers), form=form
        )
        for readers in (None, prompt_readers(table, torch.ones(slots, device=DEVICE), members_of(q_heads // kv_heads)))
    )

    def read(pages_nP, tokens):
        return quantiser.decode(0, stored.map(lambda each: gathered_prompts(each, pages_nP, tokens)), torch.float32)

    scaled = {"scale": 0.05, "softcap": form.softcap}
    own = attention_part(query, *quantiser.decode(0, cached, torch.float32), lengths + 1, **scaled)
    asked = prompts > 0
    stored_part = [torch.zeros_like(own[0]), torch.full_like(own[1], -torch.inf)]
    for whole, part in zip(
        stored_part, prompt_attention(query[asked], table[asked], prompts[asked], read, **scaled), strict=True
    ):
        whole[asked] = part
    expected = merged_parts(stored_part, own, sinks_Q=form.sinks_Q)
    torch.testing.assert_close(once.float(), expected, atol=0.03, rtol=0.03)
    torch.testing.assert_close(alone.float(), once.float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize(("name", "dtype"), [("8bit", torch.bfloat16), ("4bit", torch.float32)])
@pytest.mark.parametrize("dim", [16, 24, 64, 128])
def test_codes_of_rows_of_several_layers_are_decoded(name, dim, dtype):
    torch.manual_seed(0)
    scales = KeyScales.of([channel_range(keys_of(2, 3, 300, dim)) for _ in range(2)])
    quantiser, layers = Quantiser(name, scales), torch.tensor([1, 0, 1], device=DEVICE)
    both = [quantiser.encode(layer, keys_of(1, 3, 70, dim), torch.randn(1, 3, 70, dim, device=DEVICE)) for layer in (1, 0, 1)]
    stored = Stored(*(torch.cat(each) for each in zip(*both, strict=True)))
    keys, values = quantiser.schemes
    tokens = (quantiser._of_token(steps) for steps in (stored.key_steps, stored.value_steps))
    expected_keys = keys.restore(stored.keys, next(tokens), quantiser.static(layers, centre=True), dtype)
    expected_values = values.restore(stored.values, next(tokens), None, dtype)
    centre, step = (each[layers] for each in scales)
    torch.testing.assert_close(fused_decode(stored.keys, stored.key_steps, step, centre, dtype), expected_keys)
    torch.testing.assert_close(fused_decode(stored.values, stored.value_steps, None, None, dtype), expected_values)
    first = both[0]
    plain = keys.restore(first.keys, quantiser._of_token(first.key_steps), quantiser.static(1, centre=False), dtype)
    torch.testing.assert_close(fused_decode(first.keys, first.key_steps, scales.step_LHD[1], None, dtype), plain)


def test_the_largest_integer_products_do_not_overflow():
    """All codes of the query and of one key are the largest, in the largest head. A sum beyond int32 would hide the key."""
    dim, ones = 512, torch.ones(1, 1, 512, device=DEVICE)
    quantiser = Quantiser("8bit", KeyScales.unset(1, 1, dim, DEVICE))
    cached = quantiser.encode(0, -ones[:, :, None].expand(1, 1, 2, dim), ones[:, :, None].expand(1, 1, 2, dim))
    cached.keys[:, :, 0] = 127
    places, ring = torch.zeros(1, 1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, 1, 0, dim, device=DEVICE)
    lengths = torch.ones(1, dtype=torch.int64, device=DEVICE)
    new = (each.bfloat16() for each in (ones, -ones, -ones))
    out = attend_and_append_codes(
        *new, cached, places, ring.bfloat16(), lengths, lengths, *(each[0] for each in quantiser.scales), scale=0.1
    )
    torch.testing.assert_close(out.float(), ones, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", ["8bit", "4bit"])
def test_a_constant_or_empty_head_is_stored(name):
    """A head of zeros has no largest value, so its step is the smallest one."""
    quantiser = Quantiser(name, KeyScales.unset(1, 2, 16, DEVICE))
    zeros = torch.zeros(3, 2, 1, 16, device=DEVICE)
    cached = Stored(
        *(torch.zeros(3, 2, 4, each.shape[-1], dtype=each.dtype, device=DEVICE) for each in quantiser.encode(0, zeros, zeros))
    )
    args = (torch.zeros(3, 2, 16, device=DEVICE),) * 3
    places, ring = torch.zeros(3, 2, 4, dtype=torch.int32, device=DEVICE), torch.zeros(3, 2, 0, 16, device=DEVICE)
    lengths = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    out = attend_and_append_codes(
        *args, cached, places, ring, lengths, lengths, *(each[0] for each in quantiser.scales), scale=1.0
    )
    assert bool((out == 0).all()) and bool((cached.key_steps[:, :, 0] > 0).all())
    assert KV(dtype=name).quantised
