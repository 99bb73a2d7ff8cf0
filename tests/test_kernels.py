"""The Triton kernels say what their torch references say: here through Triton's interpreter, on a GPU compiled."""

import pytest
import torch

from small_models import covering
from sparse_rl.config import Sampling
from sparse_rl.kernels.attention import (
    attention_part,
    decode_attention,
    merged_parts,
    paged_decode_attention,
    prompt_attention,
)
from sparse_rl.kernels.choose import fused_choose
from sparse_rl.kernels.counter_rng import uniform
from sparse_rl.kernels.draw import BLOCK, draw_and_advance
from sparse_rl.kernels.form import AttentionForm
from sparse_rl.kernels.gather import dropped_positions, fused_keep, keep_in_place
from sparse_rl.kernels.importance import decode_importance, fused_importance, window_logits
from sparse_rl.kernels.jit import triton
from sparse_rl.kernels.nucleus import GROUP, Truncation, find_cuts
from sparse_rl.kernels.predicted import fused_logits
from sparse_rl.kernels.prompt_readers import members_of, programs_of, prompt_readers
from sparse_rl.kernels.redundancy import fused_sums, tiled_sums
from sparse_rl.kernels.rows import Rows, StoredPrompts, gathered_prompts
from sparse_rl.kernels.slot_attention import attend_and_append, attend_in_ring, splits_for
from sparse_rl.kv.policies.base import ROUNDING, rank
from sparse_rl.kv.policies.triattention import predicted_logits
from sparse_rl.rollout.sampling import sample, truncate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(0)


def test_triton_is_installed():
    """Without it every test here would say nothing."""
    assert triton is not None


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "splits", "dtype"),
    [
        *((6, 2, 64, splits, torch.float32) for splits in (1, 3, 7)),
        *((2, 2, 24, 3, torch.float32), (4, 2, 160, 7, torch.float32)),
        *((6, 2, 64, 7, torch.bfloat16), (2, 2, 24, 1, torch.bfloat16), (4, 2, 160, 3, torch.bfloat16)),
    ],
)
def test_a_step_of_attention_reads_the_stored_prompt_and_the_slot(q_heads, kv_heads, dim, splits, dtype):
    """Prompts in scattered pages, two of them shared, of one token, of full pages and of many; and a slot without a prompt,
    as the rows that fill up a graph are."""
    slots, capacity, pages, page = 6, 135, 12, 64
    lengths = torch.tensor([0, 1, 70, 134, 64, 5], device=DEVICE)
    prompts = torch.tensor([1, 130, 130, 128, 63, 0], device=DEVICE)
    table = torch.tensor([[7, 0, 0], [3, 11, 1], [3, 11, 1], [2, 8, 0], [5, 0, 0], [4, 4, 4]], device=DEVICE)
    stored_keys, stored_values = torch.randn(2, pages, kv_heads, page, dim, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, slots, kv_heads, capacity, dim, device=DEVICE).to(dtype)
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    key, value = torch.randn(2, slots, kv_heads, dim, device=DEVICE).to(dtype)
    expected_keys, expected_values = keys.clone(), values.clone()
    whole = []
    for slot, (length, tokens) in enumerate(zip(lengths.tolist(), prompts.tolist(), strict=True)):
        expected_keys[slot, :, length], expected_values[slot, :, length] = key[slot], value[slot]
        both = []
        for stored, own in ((stored_keys, expected_keys), (stored_values, expected_values)):
            prompt = torch.cat(list(stored[table[slot]]), dim=1)[:, :tokens]
            both.append(torch.cat([prompt, own[slot, :, : length + 1]], dim=1).float())
        weights = (query[slot].float().view(kv_heads, -1, dim) @ both[0].transpose(-1, -2) * 0.2).softmax(dim=-1)
        whole.append((weights @ both[1]).reshape(q_heads, dim))
    tolerance = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    some = prompts > 0  # the reference needs a prompt

    def read(pages_nP, tokens):
        return gathered_prompts(stored_keys, pages_nP, tokens), gathered_prompts(stored_values, pages_nP, tokens)

    merged = merged_parts(
        prompt_attention(query[some], table[some], prompts[some], read, scale=0.2),
        attention_part(query[some], expected_keys[some], expected_values[some], lengths[some] + 1, scale=0.2),
    )
    torch.testing.assert_close(merged, torch.stack(whole)[some])
    in_pages = (each.float() for each in read(table, int(prompts.max())))
    own = (expected_keys.float(), expected_values.float(), lengths + 1)
    torch.testing.assert_close(paged_decode_attention(query.float(), *in_pages, prompts, *own, scale=0.2), torch.stack(whole))
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.zeros(slots, q_heads, 0, dim, dtype=dtype, device=DEVICE)
    state = (keys, values, places, ring, lengths, prompts + lengths)
    stored = StoredPrompts(stored_keys, stored_values, table.int(), prompts)
    out = attend_and_append(query, key, value, *state, scale=0.2, splits=splits, prompts=stored)
    torch.testing.assert_close(out.float(), torch.stack(whole), **tolerance)
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "splits", "dtype"), [(6, 2, 64, 1, torch.bfloat16), (2, 2, 24, 3, torch.float32)]
)
def test_a_prompt_is_read_once_for_the_slots_that_share_it(q_heads, kv_heads, dim, splits, dtype):
    """The result is that of the definition, as it is for slots that read alone. There are groups within a program and across two,
    a slot with its own prompt, one that has ended, whose page belongs to another group by now, soft caps and learned sinks."""
    slots, capacity, page = 19, 70, 64
    prompts = torch.tensor([130] * 9 + [64] + [7] * 8 + [0], device=DEVICE)
    table = torch.tensor([[3, 11, 1]] * 9 + [[5, 0, 0]] + [[2, 0, 0]] * 8 + [[3, 8, 0]], device=DEVICE).int()
    mixed = torch.cat([torch.randperm(18), torch.tensor([18])]).to(DEVICE)  # a program reads the pages of its last slot
    prompts, table = prompts[mixed], table[mixed]
    stored = torch.randn(2, 12, kv_heads, page, dim, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, slots, kv_heads, capacity, dim, device=DEVICE).to(dtype)
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    new = torch.randn(2, slots, kv_heads, dim, device=DEVICE).to(dtype)
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.zeros(slots, q_heads, 0, dim, dtype=dtype, device=DEVICE)
    lengths = torch.randint(capacity, (slots,), device=DEVICE)
    state = (query, *new, keys, values, places, ring, lengths, prompts + lengths)
    tolerance = {} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    readers = prompt_readers(table, torch.ones(slots, device=DEVICE), members_of(q_heads // kv_heads))
    alone, shared = (StoredPrompts(*stored, table, prompts, each) for each in (None, readers))
    plain, full = AttentionForm(), AttentionForm(softcap=2.0, sinks_Q=torch.randn(q_heads, device=DEVICE))
    for read, form in ((shared, full), (shared, plain) if splits == 1 else (alone, full)):
        ours = attend_and_append(*state, scale=0.2, splits=splits, prompts=read, form=form)
        whole = []
        for slot, (prompt, length) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
            pages, own = stored[:, table[slot].long()].transpose(1, 2).flatten(2, 3), torch.stack([keys[slot], values[slot]])
            whole.append(
                weighted(
                    query[slot],
                    *torch.cat([pages[:, :, :prompt], own[:, :, : length + 1]], dim=2),
                    form.softcap,
                    form.sinks_Q,
                )
            )
        torch.testing.assert_close(ours.float(), torch.stack(whole), **tolerance)


@pytest.mark.parametrize(("splits", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(6, 2, 64), (2, 2, 24), (40, 2, 32)])
def test_a_step_of_attention_appends_and_attends(q_heads, kv_heads, dim, splits, dtype):
    slots, capacity, window = 4, 135, 5
    lengths = torch.tensor([0, 1, 70, 134], device=DEVICE)
    positions = lengths + torch.tensor([3, 7, 1000, 4], device=DEVICE)
    keys, values = torch.randn(2, slots, kv_heads, capacity, dim, device=DEVICE).to(dtype)
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)
    ring = torch.randn(slots, q_heads, window, dim, device=DEVICE).to(dtype)
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    fused = torch.randn(slots, 2 * kv_heads * dim, device=DEVICE).to(dtype)  # as one product of projections leaves them
    key, value = (half.unflatten(1, (kv_heads, dim)) for half in fused.chunk(2, dim=1))
    expected_keys, expected_values, expected_ring = keys.clone(), values.clone(), ring.clone()
    for slot, (length, position) in enumerate(zip(lengths.tolist(), positions.tolist(), strict=True)):
        expected_keys[slot, :, length], expected_values[slot, :, length] = key[slot], value[slot]
        expected_ring[slot, :, position % window] = query[slot]
    expected = decode_attention(
        query.float(), expected_keys.float(), expected_values.float(), lengths + 1, longest=capacity, even=False, scale=0.2
    )
    state = (keys, values, places, ring, lengths, positions)
    out = attend_and_append(query, key, value, *state, scale=0.2, splits=splits)
    torch.testing.assert_close(out.float(), expected, **({} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}))
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    torch.testing.assert_close(ring, expected_ring, rtol=0, atol=0)
    assert [places[slot, 0, length].item() for slot, length in enumerate(lengths.tolist())] == positions.tolist()
    assert int((places != 0).sum()) == slots * kv_heads


FORMS = {"plain": (None, False), "capped": (1.5, False), "sinks": (None, True), "both": (1.5, True)}


def weighted(query, keys, values, softcap, sinks):
    """One query [Q, D] over keys and values [H, T, D] by the definition, in float64."""
    logits = query.double().unflatten(0, (len(keys), -1)) @ keys.double().transpose(-1, -2) * 0.2
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(len(keys), -1, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.double()).flatten(0, 1).float()


@pytest.mark.parametrize(("splits", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_attention_within_a_window_replaces_the_oldest_token(form, splits, dtype):
    """Rings that are empty, partly filled, just full, and full many times over."""
    softcap, has_sinks = FORMS[form]
    slots, q_heads, kv_heads, dim, capacity = 7, 6, 2, 32, 65
    positions = torch.tensor([0, 1, 63, 64, 65, 66, 1000], device=DEVICE)
    sinks = torch.randn(q_heads, device=DEVICE).to(dtype) if has_sinks else None
    keys, values = torch.randn(2, slots, kv_heads, capacity, dim, device=DEVICE).to(dtype)
    query = torch.randn(slots, q_heads, dim, device=DEVICE).to(dtype)
    key, value = torch.randn(2, slots, kv_heads, dim, device=DEVICE).to(dtype)
    expected_keys, expected_values, whole = keys.clone(), values.clone(), []
    for slot, position in enumerate(positions.tolist()):
        expected_keys[slot, :, position % capacity], expected_values[slot, :, position % capacity] = key[slot], value[slot]
        held = min(position + 1, capacity)
        whole.append(weighted(query[slot], expected_keys[slot, :, :held], expected_values[slot, :, :held], softcap, sinks))
    shape = AttentionForm(capacity, softcap, sinks)
    out = attend_in_ring(query, key, value, keys, values, positions, scale=0.2, splits=splits, form=shape)
    torch.testing.assert_close(
        out.float(), torch.stack(whole), **({} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02})
    )
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    lengths = (positions + 1).clamp(max=capacity)
    ours = decode_attention(
        *(query, expected_keys, expected_values, lengths), longest=capacity, even=False, scale=0.2, form=shape
    )
    torch.testing.assert_close(ours, out, **({} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_attention_caps_logits_and_adds_sinks(form, splits):
    """Over a slot alone, and over a stored prompt and a slot."""
    softcap, has_sinks = FORMS[form]
    slots, q_heads, kv_heads, dim, capacity, page = 3, 6, 2, 32, 70, 64
    lengths, prompts = torch.tensor([0, 5, 69], device=DEVICE), torch.tensor([1, 100, 64], device=DEVICE)
    table = torch.tensor([[2, 0], [3, 1], [0, 0]], device=DEVICE)
    sinks = torch.randn(q_heads, device=DEVICE) if has_sinks else None
    shape = AttentionForm(None, softcap, sinks)
    stored_keys, stored_values = torch.randn(2, 4, kv_heads, page, dim, device=DEVICE)
    keys, values = torch.randn(2, slots, kv_heads, capacity, dim, device=DEVICE)
    query, ring = torch.randn(slots, q_heads, dim, device=DEVICE), torch.zeros(slots, q_heads, 0, dim, device=DEVICE)
    key, value = torch.randn(2, slots, kv_heads, dim, device=DEVICE)
    places = torch.zeros(slots, kv_heads, capacity, dtype=torch.int32, device=DEVICE)

    def read(pages_nP, tokens):
        return gathered_prompts(stored_keys, pages_nP, tokens), gathered_prompts(stored_values, pages_nP, tokens)

    for stored in (None, StoredPrompts(stored_keys, stored_values, table.int(), prompts)):
        state = (keys, values, places, ring, lengths, lengths)
        out = attend_and_append(query, key, value, *state, scale=0.2, splits=splits, prompts=stored, form=shape)
        whole = []
        for slot, length in enumerate(lengths.tolist()):
            own = (keys[slot, :, : length + 1], values[slot, :, : length + 1])
            if stored is not None:
                prompt = (each[0] for each in read(table[slot : slot + 1], int(prompts[slot])))
                own = tuple(torch.cat(pair, dim=1) for pair in zip(prompt, own, strict=True))
            whole.append(weighted(query[slot], *own, softcap, sinks))
        torch.testing.assert_close(out, torch.stack(whole))
        how = {"scale": 0.2, "form": shape}
        if stored is None:
            ours = decode_attention(query, keys, values, lengths + 1, longest=capacity, even=False, **how)
        else:
            ours = paged_decode_attention(query, *read(table, 100), prompts, keys, values, lengths + 1, **how)
            parts = [
                prompt_attention(query, table, prompts, read, scale=0.2, softcap=softcap),
                attention_part(query, keys, values, lengths + 1, scale=0.2, softcap=softcap),
            ]
            torch.testing.assert_close(merged_parts(*parts, sinks_Q=sinks), out)
        torch.testing.assert_close(ours, out)


@pytest.mark.parametrize(
    ("slots", "kv_heads", "capacity", "splits"),
    [
        (256, 2, 640, 1),  # 512 programs nearly fill 4 on each of 132 processors
        (1000, 8, 32768, 1),  # more than fill them
        (128, 2, 640, 1),  # 256 programs fill half: splitting costs more than it gains
        (16, 8, 32768, 4),  # 128 programs fill a quarter
        (8, 2, 2048, 16),  # would fill with 33, but each has two blocks of 64 keys
        (1, 2, 200, 1),
        (1, 2, 255, 1),
        (1, 2, 256, 2),
        (1, 2, 32768, 64),  # the most that one launch combines
    ],
)
def test_few_slots_share_rows_only_where_rows_are_long(slots, kv_heads, capacity, splits):
    assert splits_for(slots, kv_heads, capacity, processors=132) == splits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draw_is_the_references(vocab, temperature, dtype):
    slots = 6
    logits = (4 * torch.randn(slots, vocab, device=DEVICE)).to(dtype)
    logits[0, 3:] = -torch.inf  # a vocabulary of which most is masked
    seeds = torch.randint(2**62, (slots,), device=DEVICE)
    positions = torch.tensor([0, 5, 17, 2**20, 4, 9], device=DEVICE)
    sampling = Sampling(temperature=temperature)
    tokens, _ = sample(logits, uniform(seeds, positions + 1), sampling)
    exact = (logits.double() / sampling.logprob_temperature).log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    state = {name: torch.zeros(slots, dtype=torch.int64, device=DEVICE) for name in ("tokens", "lengths", "steps")}
    state["steps"] += 1
    last = torch.tensor([100, 100, 100, 2**21, 4, 100], device=DEVICE)
    where = positions.clone()
    sampled = torch.full((3, slots), -1, device=DEVICE)
    said = torch.zeros(3, slots, device=DEVICE)
    at = torch.tensor([sampling.logprob_temperature], device=DEVICE)
    draw_and_advance(
        logits,
        state["tokens"],
        where,
        state["lengths"],
        state["steps"],
        seeds,
        last,
        at,
        sampled,
        said,
        greedy=temperature == 0,
    )
    assert sampled[1].tolist() == tokens.tolist() == state["tokens"].tolist()
    assert sampled[0].tolist() == sampled[2].tolist() == [-1] * slots
    torch.testing.assert_close(said[1].double(), exact, atol=2e-6, rtol=1e-6)
    assert where.tolist() == torch.minimum(positions + 1, last).tolist()
    assert state["steps"].tolist() == [2] * slots and state["lengths"].tolist() == [1] * slots


def test_logits_that_are_not_numbers_show_in_the_log_prob():
    logits = torch.zeros(2, 10, device=DEVICE)
    logits[0, 4] = torch.nan
    zeros = [torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(6)]
    sampled, said = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    for greedy in (False, True):
        state = [each.clone() for each in zeros]
        draw_and_advance(logits, *state, torch.ones(1, device=DEVICE), sampled, said, greedy=greedy)
        assert not bool(said[0, 0].isfinite()) and bool(said[0, 1].isfinite())
        assert 0 <= int(sampled[0, 0]) < 10


def truncation(top_k, top_p):
    return Truncation(torch.tensor([top_k], device=DEVICE), torch.tensor([top_p], dtype=torch.float64, device=DEVICE))


def drawn_by_kernel(logits, seeds, positions, sampling):
    """Tokens and log-probs of a truncated draw."""
    slots = len(logits)
    tokens, lengths, steps = (torch.zeros(slots, dtype=torch.int64, device=DEVICE) for _ in range(3))
    sampled, said = torch.full((1, slots), -1, device=DEVICE), torch.zeros(1, slots, device=DEVICE)
    state = (tokens, positions.clone(), lengths, steps, seeds, positions + 100)
    at = torch.tensor([sampling.temperature], device=DEVICE)
    cut = truncation(sampling.top_k, sampling.top_p)
    draw_and_advance(logits, *state, at, sampled, said, greedy=False, truncation=cut)
    return sampled[0], said[0]


def kept_by_kernel(logits, temperature, top_k, top_p):
    """Which tokens stay, of those that have a weight."""
    padded = torch.nn.functional.pad(logits.float(), (0, -logits.shape[1] % BLOCK), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, BLOCK)) / temperature
    tops = blocks.amax(dim=-1)
    sums = (blocks - tops.clamp(min=-1e30)[..., None]).exp().double().sum(dim=-1)
    group_tops = padded.unflatten(1, (-1, GROUP)).amax(dim=-1)
    at = torch.tensor([temperature], device=DEVICE)
    thresholds, last_ids = find_cuts(logits, at, truncation(top_k, top_p), tops, sums, group_tops)
    ids = torch.arange(logits.shape[1], device=DEVICE)
    return (logits > thresholds[:, None]) | ((logits == thresholds[:, None]) & (ids <= last_ids[:, None]))


def row_of_logits(kind, vocab):
    logits = torch.randn(1, vocab, device=DEVICE)
    if kind == "flat":
        return 0.1 * logits
    if kind == "ties":
        return (2 * logits).round() / 2
    if kind == "masked":
        return (4 * logits).masked_fill(torch.arange(vocab, device=DEVICE) % 300 > 20, -torch.inf)
    return 5 * logits


KINDS = ["flat", "ties", "masked", "peaked"]
CUTS = {
    torch.float32: [(0, 0.95, BLOCK + 5), (50, 0.7, 300)],
    torch.bfloat16: [(0, 0.95, 2 * BLOCK + 5), (0, 1e-6, BLOCK), (1, 1.0, 300), (50, 1.0, BLOCK), (10**6, 0.9, 700)],
    torch.float16: [(0, 0.5, BLOCK + 5), (5, 1.0, 300), (10**6, 1.0, 7)],
}
"""top_k, top_p, vocabulary"""


@pytest.mark.parametrize(("kind", "dtype"), covering(KINDS, [*DTYPES, torch.float16]))
def test_what_stays_is_what_a_sort_would_keep(kind, dtype):
    for top_k, top_p, vocab in CUTS[dtype]:
        logits = row_of_logits(kind, vocab).to(dtype)
        weights = (logits.float() / 0.8).softmax(dim=-1)
        kept = kept_by_kernel(logits, 0.8, top_k, top_p) & (weights > 0)
        assert torch.equal(kept, truncate(weights, top_k, top_p) > 0), (top_k, top_p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_draw_is_the_references(kind, dtype):
    positions = torch.tensor([17], device=DEVICE)
    logits = row_of_logits(kind, 2 * BLOCK + 5).to(dtype)
    seeds = torch.randint(2**62, (1,), device=DEVICE)
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20 if kind == "ties" else 0)
    expected = sample(logits, uniform(seeds, positions + 1), sampling)
    sampled, said = drawn_by_kernel(logits, seeds, positions, sampling)
    assert sampled.tolist() == expected[0].tolist()
    torch.testing.assert_close(said, expected[1], atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (3, 1.0, [2, 130, 300]),
        (4, 1.0, [2, 5, 130, 300]),
        (0, 0.25, [2]),  # a share that is just reached needs no more
        (0, 0.251, [2, 130]),
        (0, 0.8125, [2, 5, 130, 300]),
        (0, 0.813, [2, 5, 130, 140, 300]),
        (2, 0.5, [2]),
        (2, 0.501, [2, 130]),
        (6, 0.999, [2, 5, 130, 140, 200, 300]),
    ],
)
def test_ties_at_the_cut_go_to_lower_ids(top_k, top_p, expected):
    """Three tokens of a quarter each and four of a sixteenth, far apart."""
    logits = torch.full((1, 5000), -torch.inf, device=DEVICE)
    logits[0, [2, 130, 300]] = 0.0
    logits[0, 130] = -0.0  # an equal of 0.0
    logits[0, [5, 140, 200, 4999]] = -2.0
    temperature = 2 / torch.tensor(4.0).log().item()
    kept = kept_by_kernel(logits.bfloat16(), temperature, top_k, top_p)
    assert kept[0].nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_truncated_draw_from_rows_that_are_not_numbers_ends(top_k):
    vocab = BLOCK + 10
    logits = torch.randn(4, vocab, device=DEVICE)
    logits[0, 4] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    zeros = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    tokens, said = drawn_by_kernel(logits.bfloat16(), zeros, zeros, Sampling(temperature=0.8, top_k=top_k, top_p=0.9))
    assert said.isfinite().tolist() == [False, False, False, True]
    assert bool(((tokens >= 0) & (tokens < vocab)).all())


@pytest.mark.parametrize(("total", "dim"), [(20, 16), (70, 24), (131, 64)])
@pytest.mark.parametrize(
    ("threshold", "dtype"), [(-0.2, torch.float32), (0.2, torch.float32), (0.2, torch.bfloat16), (0.99, torch.bfloat16)]
)
def test_redundancy_without_the_matrix(total, dim, threshold, dtype):
    keys = torch.randn(2, 2, total, dim, device=DEVICE).to(dtype)
    keys[0, 0, total // 2] = keys[0, 0, 1]  # one that repeats
    torch.testing.assert_close(fused_sums(Rows.of(keys), threshold), tiled_sums(keys, threshold), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "window", "dim"), [(6, 2, 8, 32), (2, 2, 3, 24), (7, 1, 32, 16)])
def test_importance_in_one_launch(q_heads, kv_heads, window, dim, dtype):
    queries = torch.randn(2, q_heads, window, dim, device=DEVICE).to(dtype)
    keys = torch.randn(2, kv_heads, 100, dim, device=DEVICE).to(dtype)
    logits = window_logits(queries, keys[:, :, : 100 - window]).amax(dim=2)
    expected = logits.softmax(dim=-1).mean(dim=-2)
    torch.testing.assert_close(fused_importance(queries, Rows.of(keys)), expected, atol=1e-6, rtol=1e-4)
    some = torch.tensor([1, 0], device=DEVICE)
    swapped = fused_importance(queries[some].contiguous(), Rows(keys, some, 100))
    torch.testing.assert_close(swapped, expected[some], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(decode_importance(queries, keys), expected, atol=1e-6, rtol=1e-4)


def test_importance_of_large_logits_is_finite():
    queries, keys = torch.randn(1, 2, 4, 16, device=DEVICE) * 100, torch.randn(1, 2, 60, 16, device=DEVICE) * 100
    expected = window_logits(queries, keys[:, :, :56]).amax(dim=2).softmax(dim=-1).mean(dim=-2)
    torch.testing.assert_close(fused_importance(queries, Rows.of(keys)), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "tokens", "dim"), [(6, 2, 100, 32), (2, 2, 64, 24), (7, 1, 3, 16)])
def test_products_with_a_virtual_query(q_heads, kv_heads, tokens, dim, dtype):
    """Other pairs in every row, and rows of a cache in another order."""
    keys = torch.randn(3, kv_heads, tokens, dim).to(dtype)
    rows = torch.tensor([2, 0])
    virtual = torch.randn(2, q_heads, dim // 2, dtype=torch.complex64)
    spread = torch.rand(2, q_heads, dim // 2)
    pairs = torch.stack([torch.randperm(dim).view(-1, 2) for _ in range(2)])
    expected = predicted_logits(virtual, spread, keys[rows], pairs)
    there = (virtual.to(DEVICE), spread.to(DEVICE), Rows(keys.to(DEVICE), rows.to(DEVICE), tokens), pairs.to(DEVICE))
    torch.testing.assert_close(fused_logits(*there).cpu(), expected, atol=2e-5, rtol=1e-5)
    held = predicted_logits(virtual, spread, Rows(keys, rows, 2), pairs)
    torch.testing.assert_close(held, expected[..., :2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("held", "kept"), [(200, 150), (32, 24), (300, 65), (5, 4)])
@pytest.mark.parametrize(("dtype", "groups"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.int8, 1), (torch.uint8, 6)])
def test_what_is_kept_moves_to_the_front_in_place(dtype, groups, held, kept):
    """Keys and values in the model's dtype or as codes, the steps of the codes, and positions."""
    rows, heads, capacity, dim = 5, 2, held + 10, 24
    keys, values = (100 * torch.rand(2, rows, heads, capacity, dim, device=DEVICE)).to(dtype)
    steps = torch.randn(2, rows, heads, capacity, groups, device=DEVICE).half()
    positions = torch.randint(1000, (rows, heads, capacity), dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor([3, 0], device=DEVICE)
    order = torch.rand(2, heads, held, device=DEVICE).argsort(dim=-1)[..., :kept].sort(dim=-1).values
    moved = (keys, values, *steps, positions)
    before = [tensor.clone() for tensor in moved]
    plain = [tensor.clone() for tensor in before]
    dropped = keep_in_place(*plain, chosen, order, held)  # torch, on a CPU
    torch.testing.assert_close(fused_keep(*moved, chosen, order, held), dropped, rtol=0, atol=0)
    for now, torchs in zip(moved, plain, strict=True):
        torch.testing.assert_close(now[:, :, :kept], torchs[:, :, :kept], rtol=0, atol=0)
    for now, then in zip(moved, before, strict=True):
        for number, row in enumerate(chosen.tolist()):
            for head in range(heads):
                torch.testing.assert_close(now[row, head, :kept], then[row, head, order[number, head]], rtol=0, atol=0)
        untouched = [row for row in range(rows) if row not in chosen.tolist()]
        torch.testing.assert_close(now[untouched], then[untouched], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["random", "ties", "near ties", "chain", "all equal", "negative"])
@pytest.mark.parametrize(("scored", "window", "kept", "sinks"), [(50, 4, 20, 3), (130, 0, 64, 0), (9, 8, 12, 0)])
def test_who_stays_is_who_the_sorts_would_keep(kind, scored, window, kept, sinks):
    rows, heads = 3, 2
    scores = torch.rand(rows, heads, scored, device=DEVICE)
    if kind == "ties":
        scores = (scores * 6).round()
    elif kind == "near ties":
        scores = (scores * 6).round() * (1 + 1e-6 * torch.rand_like(scores))
    elif kind == "chain":  # each equals the next up to rounding, the first and the last do not
        scores = 1 + 1e-6 * torch.arange(scored, device=DEVICE).expand_as(scores)
    elif kind == "all equal":
        scores = torch.full_like(scores, -0.5)
    elif kind == "negative":
        scores = scores.log()
        scores[0, 0, ::3] = -torch.inf
    protected = torch.tensor([0, 5, 1], device=DEVICE)
    for protect in (None, protected):
        forced = torch.arange(scored, device=DEVICE)[None] < (0 if protect is None else protect[:, None])
        forced = forced | (torch.arange(scored, device=DEVICE) < sinks)
        best = rank(scores.masked_fill(forced[:, None], torch.inf))[..., : kept - window].sort(dim=-1).values
        last = torch.arange(scored, scored + window, device=DEVICE).expand(rows, heads, window)
        chosen = fused_choose(scores, scored + window, kept, sinks, protect, ROUNDING)
        assert torch.equal(chosen, torch.cat([best, last], dim=-1))
        positions = torch.randint(1000, (rows, heads, scored + window), device=DEVICE).int()
        gone = torch.ones_like(positions, dtype=torch.bool).scatter_(2, chosen, False)
        assert torch.equal(dropped_positions(positions, chosen).flatten(), positions[gone])


@pytest.mark.parametrize(
    ("sizes", "members", "programs"),
    [
        ([8] * 32, 8, 32),
        ([5, 8, 3, 8, 1, 7] * 8, 8, 48),  # groups that have lost slots: a program reads one prompt
        ([16, 3, 9], 8, 5),
        ([2] * 40, 8, 10),  # more prompts than programs: slots are consecutive
        ([1], 16, 1),
        ([4], 1, 4),
    ],
)
def test_a_program_reads_one_prompt_if_there_are_enough_programs(sizes, members, programs):
    prompts = torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)], device=DEVICE)
    prompts = 3 * prompts[torch.randperm(len(prompts), device=DEVICE)]
    readers = prompt_readers(prompts[:, None], torch.ones_like(prompts), members)
    assert readers.shape == (programs_of(len(prompts), members), members)
    assert sorted(readers[readers >= 0].tolist()) == list(range(len(prompts)))
    used = [program[program >= 0] for program in readers if program.max() >= 0]
    assert len(used) == programs
    if len(sizes) <= len(readers):
        assert all(len(prompts[program].unique()) == 1 for program in used)


def test_slots_without_a_prompt_do_not_share_a_program_with_a_live_group():
    """Their pages may belong to that group by now."""
    table = torch.tensor([[3, 1]] * 6 + [[7, 2]] * 4, device=DEVICE)
    readers = prompt_readers(table, torch.tensor([90, 0, 90, 90, 0, 90] + [40] * 4, device=DEVICE), 8)
    assert [sorted(each[each >= 0].tolist()) for each in readers] == [[1, 4], [0, 2, 3, 5], [6, 7, 8, 9], []]
    none = prompt_readers(table, torch.zeros(10, device=DEVICE), 8)
    assert sorted(none[none >= 0].tolist()) == list(range(10))
