"""The same promises on a CUDA device, where equality is up to rounding. Run with `pytest -m gpu` on a machine with one."""

import itertools

import pytest
import torch

from random_models import noise_early_and_late, random_model
from sparse_rl import KV, Engine, Sampling, load_model, replay
from sparse_rl.cli import main
from sparse_rl.kernels import jit, long_attention, shadow
from sparse_rl.kernels.attention import causal_attention, packed_causal_attention
from sparse_rl.kernels.prefix_attention import PrefixAttention, Segment, last_tokens_attention
from sparse_rl.kv.policies import POLICIES
from sparse_rl.kv.prompt_store import PromptStore
from sparse_rl.kv.trace import NEVER
from sparse_rl.learner.logprobs import token_logprobs
from sparse_rl.learner.replay import ReplayView, Span
from sparse_rl.models.head import Head
from sparse_rl.rollout import runner
from sparse_rl.sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS
from sparse_rl.train.run_folder import RunFolder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = {"budget": 32, "interval": 8, "window": 4, "sinks": 2}
PROMPTS = [[7, 8, 9, 10, 11], list(range(3, 60))]


@pytest.fixture(scope="module", autouse=True)
def no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_reproduces_the_sampler_in_float32(policy, architecture):
    model = random_model(architecture).cuda()
    rollouts = Engine(model, KV(policy=policy, protect_prompt=False, **SMALL), slots=3).generate(
        PROMPTS, 2, Sampling(max_tokens=130, stop=())
    )
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), rollout.logprobs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("stored", ["8bit", "4bit"])
@pytest.mark.parametrize("policy", ["full", "rkv", "tova"])
@pytest.mark.parametrize("protect_prompt", [False, True])
def test_replay_reproduces_a_quantised_sampler(policy, stored, protect_prompt):
    """In float32, tokens after a flipped code differ by more than rounding, and most tokens come before one."""
    model = random_model("qwen2").cuda()
    kv = KV(policy=policy, dtype=stored, protect_prompt=protect_prompt and policy != "full", **SMALL)
    rollouts = Engine(model, kv, slots=3).generate(PROMPTS, 2, Sampling(max_tokens=60, stop=()))
    pairs = zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
    gaps = torch.stack([(ours.detach().cpu() - rollout.logprobs).abs() for ours, rollout in pairs])
    assert float((gaps < 1e-3).float().mean()) > 0.5 and float(gaps.mean()) < 0.02


@pytest.mark.parametrize("stored", ["8bit", "4bit"])
def test_a_gpu_without_kernels_samples_as_a_cpu(stored, monkeypatch, capsys):
    model, kv = random_model("qwen2"), KV(policy="full", dtype=stored)
    expected = Engine(model, kv, slots=2).generate(PROMPTS, sampling=Sampling(max_tokens=20, stop=()))
    monkeypatch.setattr(jit, "why_not", lambda device: "a test")
    monkeypatch.setattr(runner, "why_not", jit.why_not)
    engine = Engine(model.cuda(), kv, slots=2)
    assert not engine.use_graphs and f"With kv.dtype = {stored}" in capsys.readouterr().err
    found = engine.generate(PROMPTS, sampling=Sampling(max_tokens=20, stop=()))
    assert [each.response for each in found] == [each.response for each in expected]


@pytest.mark.parametrize("kv", [{"policy": "full"}, {"policy": "rkv", "protect_prompt": True, **SMALL}])
def test_bfloat16_noise_of_a_quantised_cache(kv, monkeypatch):
    """A step of 8 bits is as fine as bfloat16's own rounding, so flips hardly add to the noise: in training it was 0.0037, and
    0.0040 in 16 bits. In 4 bits flips dominate it (0.021), so its ratio to 16 bits says little. A replay that read other keys than
    the sampler would be as far from it as a dense replay is, so the noise must stay below half of that. Protected prompts are read
    once for all samples."""
    monkeypatch.setattr(PromptStore, "choose_reads", lambda store, *args: setattr(store, "reads_once", not store.responses))
    model = random_model("qwen2").to("cuda", torch.bfloat16)
    noise, mismatch = {}, {}
    for dtype in ("auto", "8bit", "4bit"):
        rollouts = Engine(model, KV(dtype=dtype, **kv), slots=8).generate(PROMPTS, 4, Sampling(max_tokens=200, stop=()))
        for view, found in (("sparse", noise), ("dense", mismatch)):
            pairs = zip(replay(model, rollouts, view), rollouts, strict=True)
            found[dtype] = float(torch.cat([(ours.detach().cpu() - rollout.logprobs).abs() for ours, rollout in pairs]).mean())
    assert noise["8bit"] < 2 * noise["auto"]
    assert noise["4bit"] < 0.5 * mismatch["4bit"]


def test_a_quantised_cache_takes_its_bytes_alone():
    model = load_model("tiny", dtype="bfloat16", device="cuda")
    kv = KV(policy="rkv", budget=512, interval=128, protect_prompt=False)
    whole, half, quarter = (
        Engine(model, kv.model_copy(update={"dtype": each}), slots=64) for each in ("auto", "8bit", "4bit")
    )
    assert half.cache.kv_bytes < 0.6 * whole.cache.kv_bytes and quarter.cache.kv_bytes < 0.4 * whole.cache.kv_bytes


def test_cpu_and_gpu_sample_the_same_tokens():
    """The counter-based numbers are the same everywhere, so only a near tie could part them."""
    model = load_model("tiny", dtype="float32", device="cpu")
    sampling = Sampling(max_tokens=200, stop=())
    on_cpu = Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=2).generate(PROMPTS, sampling=sampling)
    on_gpu = Engine(model.cuda(), KV(policy="rkv", protect_prompt=False, **SMALL), slots=2).generate(
        PROMPTS, sampling=sampling
    )
    for left, right in zip(on_cpu, on_gpu, strict=True):
        assert left.response[:50] == right.response[:50]


def test_bfloat16_noise_does_not_grow_with_length():
    early, late = noise_early_and_late(random_model("qwen2").to("cuda", torch.bfloat16), samples=64, tokens=1200)
    assert 0 < late < 1.1 * early < 0.1


def test_allocated_memory_is_the_capacity():
    model = load_model("tiny", dtype="bfloat16", device="cuda")
    Engine(
        model, KV(policy="rkv", budget=32, interval=8, protect_prompt=False), slots=1
    )  # a process's first pass takes cuBLAS's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = Engine(model, KV(policy="rkv", budget=512, interval=128, protect_prompt=False), slots=64)
    shape = engine.limits.shape
    expected = 2 * shape.layers * 64 * shape.kv_heads * 640 * shape.head_dim * 2
    assert engine.stats.peak_kv_bytes == 0 and engine.cache.kv_bytes == expected
    assert torch.cuda.memory_allocated() - before < expected * 1.2


TRAIN = [
    *("train", "quickstart", "--compare", "[]", "--steps", "2", "--eval.problems", "8", "--overwrite"),
    *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4", "--rollout.max-tokens", "64"),
    *("--kv.budget", "24", "--kv.interval", "8", "--model.device", "cuda"),
]


@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "dense"],
        ["--method", "sparse_rl", "--loss.kl-coef", "0.01"],
        ["--method", "smd"],
        ["--method", "sparse_rl", "--model.lora.rank", "4"],
        ["--method", "sparse_rl", "--optimizer.state", "offload"],
        ["--method", "sparse_rl", "--optimizer.state", "8bit"],
        ["--method", "smd", "--optimizer.gradient-checkpointing", "true"],
        ["--method", "sparse_rl", "--kv.dtype", "8bit", "--kv.protect-prompt", "true"],
        ["--method", "smd", "--kv.dtype", "4bit"],
        ["--method", "sparse_rl", "--model.lora.rank", "4", "--model.lora.base", "4bit"],
        ["--method", "sparse_rl", "--kv.budget", "auto"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_runs(flags, dtype, tmp_path):
    main([*TRAIN, *flags, "--model.dtype", dtype, "--run-dir", str(tmp_path / "run")])
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    noise = 1e-3 if dtype == "float32" else 0.1
    assert all(row["sparse/engine_noise"] < noise for row in rows[1:])


def test_memory_that_does_not_suffice_shows_before_the_first_step(tmp_path, capsys):
    limit = 0.004  # of the device: less than a micro-batch of this many tokens needs
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with pytest.raises(SystemExit) as exit:
            main(
                [
                    *TRAIN,
                    "--rollout.max-tokens",
                    "8000",
                    "--optimizer.tokens-per-microbatch",
                    "1000000",
                    "--rollout.prompts-per-step",
                    "64",
                    "--kv.budget",
                    "64",
                    "--eval.problems",
                    "0",
                    "--run-dir",
                    str(tmp_path / "run"),
                ]
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "the plan fits with --" in message and "--optimizer.tokens-per-microbatch" in message and message.count("\n") == 1


def test_an_update_is_the_same_on_cpu_and_gpu():
    model = random_model("qwen2")
    rollouts = Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=4).generate(
        PROMPTS, 2, Sampling(max_tokens=60, stop=())
    )
    grads = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        model.zero_grad()
        for view in ("dense", "sparse"):
            torch.cat(replay(model, rollouts, view)).sum().backward()
        grads.append([weight.grad.cpu().clone() for weight in model.parameters()])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4 * float(left.abs().max()))


def packed_tensors(tokens, dtype, q_heads=12, kv_heads=2, dim=128):
    """Transposed views of [1, N, heads, D], as transformers has them."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, tokens, heads, dim, generator=generator, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (q_heads, kv_heads, kv_heads)
    ]


def packed_spans(lengths, *, evict, layers=1, kv_heads=2):
    generator, spans, start = torch.Generator().manual_seed(0), [], 0
    for length in lengths:
        evicted_at = torch.arange(length) + 1 + torch.randint(length, (layers, kv_heads, length), generator=generator)
        kept = torch.rand(evicted_at.shape, generator=generator) < 0.2
        evicted_at = torch.where(kept, torch.tensor(NEVER), evicted_at).to(torch.int32)
        spans.append(Span(start, start + length, evicted_at if evict else None))
        start += length
    return spans


def with_gradients(attend, tensors):
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad((out.float() * out.detach().float().sin()).sum(), tensors)]


def farthest_from(reference, ours):
    """The largest of the relative distances of output and gradients."""
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[700], [1, 130, 513, 300]])
@pytest.mark.parametrize("evict", [False, True], ids=["dense", "shadow"])
def test_packed_attention_and_its_gradient_are_those_of_float64(dtype, lengths, evict):
    view, tensors = ReplayView(packed_spans(lengths, evict=evict)), packed_tensors(sum(lengths), dtype)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    ours = [each.cpu() for each in with_gradients(lambda q, k, v: view.attend(0, q, k, v, 0.1, None), tensors)]
    reference = with_gradients(lambda q, k, v: view.attend(0, q, k, v, 0.1, None), exact)
    assert farthest_from(reference, ours) < (2e-2 if dtype == torch.bfloat16 else 1e-4)
    assert not shadow._broken


@pytest.mark.parametrize("lengths", [[4096], [4097, 6000], [33000]])
def test_long_rollouts_attend_by_cudnn_as_by_flash_attention(lengths):
    tensors = packed_tensors(sum(lengths), torch.bfloat16)
    view = ReplayView(packed_spans(lengths, evict=False))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    if torch.cuda.get_device_capability() >= (9, 0):
        assert long_attention.usable(tensors[0], bounds.tolist())
    ours = with_gradients(lambda q, k, v: view.attend(0, q, k, v, 0.1, None), tensors)
    flash = with_gradients(lambda q, k, v: packed_causal_attention(q, k, v, bounds, max(lengths), 0.1), tensors)
    assert farthest_from(flash, ours) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_responses_that_share_a_prompt_attend_as_on_a_cpu(dtype):
    segments = [Segment(0, 300), Segment(300, 340, 0, 300), Segment(340, 1000, 0, 300), Segment(1000, 1100)]
    tensors = packed_tensors(1100, dtype)
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    on_gpu, on_cpu = (PrefixAttention(segments, each[0].device) for each in (tensors, exact))
    ours = [each.cpu() for each in with_gradients(lambda q, k, v: on_gpu.attend(q, k, v, 0.1), tensors)]
    reference = with_gradients(lambda q, k, v: on_cpu.attend(q, k, v, 0.1), exact)
    assert farthest_from(reference, ours) < (2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_piece_of_a_prompt_attends_as_on_a_cpu(dtype):
    """Keys are a part of a cache row, which is not contiguous."""
    torch.manual_seed(0)
    queries = torch.randn(1, 700, 4, 64, dtype=dtype, device="cuda").transpose(1, 2)
    keys, values = (torch.randn(1, 2, 2048, 64, dtype=dtype, device="cuda")[:, :, :1700] for _ in range(2))
    ours = last_tokens_attention(queries, keys, values, 0.1).cpu()
    before = torch.zeros(1, 4, 1000, 64, dtype=torch.float64)
    exact = [each.cpu().double() for each in (queries, keys, values)]
    reference = causal_attention(torch.cat([before, exact[0]], dim=2), *exact[1:], scale=0.1)[:, :, 1000:]
    assert float((ours - reference).abs().max()) < (2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize(
    "kv",
    [KV(policy="rkv", protect_prompt=False, **SMALL), KV(policy="full"), KV(policy="rkv", protect_prompt=True, **SMALL)],
    ids=["compressed", "full", "protected"],
)
def test_replay_reproduces_a_long_prompt_in_pieces(kv):
    model = random_model("qwen2").cuda()
    prompts = [[3 + 7 * at % 58 for at in range(tokens)] for tokens in (300, 40, 200)]
    rollouts = Engine(model, kv, slots=4, prefill_tokens=64).generate(prompts, 2, Sampling(max_tokens=60, stop=()))
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), rollout.logprobs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("evict", [False, True], ids=["dense", "shadow"])
def test_memory_of_packed_attention_grows_with_the_tokens_alone(evict):
    peaks = {}
    for tokens in (8192, 16384, 8192, 16384):  # the second round runs what the first compiled
        view, tensors = ReplayView(packed_spans([tokens], evict=evict)), packed_tensors(tokens, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_gradients(lambda q, k, v, view=view: view.attend(0, q, k, v, 0.1, None), tensors)
        peaks[tokens] = torch.cuda.max_memory_allocated() - before
    assert peaks[16384] < 2.2 * peaks[8192]
    assert peaks[16384] < 2 * 16384 * 16384  # two bytes for each pair of one head would be more


def test_a_pack_without_evictions_is_dense_to_the_bit():
    tensors = packed_tensors(600, torch.bfloat16)
    bounds = torch.tensor([0, 250, 600], dtype=torch.int32, device="cuda")
    kept = [Span(0, 250, None), Span(250, 600, None)]
    assert torch.equal(ReplayView(kept).attend(0, *tensors, 0.1, None), packed_causal_attention(*tensors, bounds, 350, 0.1))


def test_fused_log_probs_are_the_plain_ones():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(n, 64, generator=generator, device="cuda").requires_grad_() for n in (300, 20000)
    )  # a vocabulary that is worth a compilation
    targets = torch.randint(20000, (300,), generator=generator, device="cuda")
    factor = torch.full((300,), 0.7, device="cuda")
    parts = token_logprobs(Head(weight, None, 1.0), hidden, targets, factor)
    plain = ((hidden @ weight.T) / 0.7).log_softmax(-1)
    expected = plain.gather(-1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    for ours, theirs in zip(parts, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for a, b in zip(
            torch.autograd.grad(ours.sum(), [hidden, weight], retain_graph=True),
            torch.autograd.grad(theirs.sum(), [hidden, weight], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def gap(model, rollouts):
    pairs = zip(replay(model, rollouts, "sparse"), rollouts, strict=True)
    return max(float((ours.detach().cpu() - rollout.logprobs).abs().max()) for ours, rollout in pairs)


def test_a_graph_samples_what_single_steps_sample():
    model = random_model("qwen2").cuda()
    sampling = Sampling(max_tokens=100, stop=())
    engines = [
        Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=3, compile=compile)
        for compile in (False, True, False)
    ]
    engines[0].use_graphs = False
    alone, compiled, plain = (engine.generate(PROMPTS, 2, sampling) for engine in engines)
    assert [engine.use_graphs for engine in engines] == [False, True, True]
    for others in (compiled, plain):
        assert [each.response[:40] for each in others] == [each.response[:40] for each in alone]
        assert gap(model, others) < 1e-3


@pytest.mark.parametrize(
    ("policy", "once"), [*((name, False) for name in POLICIES if name != "full"), ("rkv", True), ("triattention", True)]
)
def test_stored_prompts_are_read_by_graphs_and_by_single_steps(policy, once, monkeypatch):
    """Prompts within a page, of many pages and in slots that are refilled; a longer prompt rebuilds store and graphs. Prompts
    are read by each slot, or once."""
    monkeypatch.setattr(PromptStore, "choose_reads", lambda store, lengths, samples: setattr(store, "reads_once", once))
    model = random_model("qwen2").cuda()
    kv = KV(policy=policy, protect_prompt=True, **SMALL)
    prompts = [*PROMPTS, list(range(3, 60)) * 5, [9] * 64]
    engines = [Engine(model, kv, slots=slots, compile=False) for slots in (5, 5, 12)]
    engines[0].use_graphs = False
    sampling = Sampling(max_tokens=100, stop=())
    alone, graphed, wide = (engine.generate(prompts, 3, sampling) for engine in engines)
    assert [engine.cache.prompts.reads_once for engine in engines] == [once] * 3
    for others in (graphed, wide):
        assert [each.response[:40] for each in others] == [each.response[:40] for each in alone]
    for rollouts in (alone, graphed, wide):
        assert gap(model, rollouts) < 1e-3
        assert all(bool((each.evicted_at[:, :, : len(each.prompt)] == NEVER).all()) for each in rollouts)
    graphs = engines[1].graphs
    assert gap(model, engines[1].generate(prompts[:2], 3, sampling)) < 1e-3 and engines[1].graphs is graphs
    assert gap(model, engines[1].generate([[7] * 1500], 3, sampling)) < 1e-3 and engines[1].graphs is not graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_pages_are_read_by_graphs_and_by_single_steps(dtype):
    """Shared prompts, pages that fill up, and sequences that pause because no page is free."""
    model = random_model("qwen2").to("cuda", dtype)
    prompts, sampling = [*PROMPTS, list(range(3, 60)) * 5, [9] * 64], Sampling(max_tokens=400, stop=())
    engines = [Engine(model, KV(policy="full"), slots=12, compile=False) for _ in range(3)]
    engines[0].use_graphs = False
    kv_bytes = (12 * DENSE_SLOT_TOKENS + 24 * PAGE_TOKENS) * engines[2].cache.token_bytes
    engines[2].reserve_dense(285, 400, 4, 3, kv_bytes=kv_bytes)
    alone, graphed, scarce = (engine.generate(prompts, 3, sampling) for engine in engines)
    assert engines[2].stats.preemptions > 0 == engines[1].stats.preemptions
    assert engines[2].stats.peak_kv_bytes == kv_bytes < engines[1].stats.peak_kv_bytes
    for rollouts in (alone, graphed, scarce):
        assert gap(model, rollouts) < (1e-3 if dtype == torch.float32 else 0.2)
        if dtype == torch.float32:
            assert [each.response[:40] for each in rollouts] == [each.response[:40] for each in alone]


def test_an_evaluation_uses_another_store_and_keeps_the_graphs():
    model, sampling = random_model("qwen2").cuda(), Sampling(max_tokens=40, stop=())
    engine = Engine(model, KV(policy="rkv", protect_prompt=True, **SMALL), slots=8, compile=False)
    engine.reserve_prompts(64, prompts=1, samples=8)
    engine.generate([[9] * 60], 8, sampling)
    graphs, store, problems = engine.graphs, engine.cache.prompts, [[9 + number] * 60 for number in range(8)]
    with engine.larger_store(8, 64):
        assert gap(model, engine.generate(problems, 1, sampling)) < 1e-3 and engine.stats.steps < 2 * 40
    assert engine.cache.prompts is store
    assert gap(model, engine.generate(problems[:1], 8, sampling)) < 1e-3 and engine.graphs is graphs


def test_one_engine_serves_every_kind_of_sampling():
    model = random_model("llama").cuda()
    engine = Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=4)
    for options in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 0.0}):
        for cut in ({}, {"top_p": 0.9}, {"top_k": 5}):
            rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=50, stop=(), **options, **cut))
            assert gap(model, rollouts) < 1e-3


@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"top_k": 5}, {"top_p": 0.7, "top_k": 20}], ids=str)
def test_truncated_draws_of_a_graph_are_those_of_single_steps(cut):
    """Single steps draw by the torch reference, so only a near tie could part them."""
    model = random_model("qwen2").cuda()
    sampling = Sampling(max_tokens=100, stop=(), temperature=0.8, **cut)
    engines = [Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=4) for _ in range(2)]
    engines[0].use_graphs = False
    alone, graphed = (engine.generate(PROMPTS, 2, sampling) for engine in engines)
    assert [engine.use_graphs for engine in engines] == [False, True]
    assert [each.response[:40] for each in graphed] == [each.response[:40] for each in alone]


def test_one_graph_truncates_by_any_numbers():
    engine = Engine(random_model("llama").cuda(), KV(policy="rkv", protect_prompt=False, **SMALL), slots=4)
    likeliest = engine.generate(PROMPTS, 2, Sampling(max_tokens=30, stop=(), temperature=0))
    for cut, narrow in (({"top_p": 0.9}, False), ({"top_k": 1}, True), ({"top_p": 1e-6, "temperature": 0.5}, True)):
        rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=30, stop=(), **cut))
        assert ([each.response for each in rollouts] == [each.response for each in likeliest]) == narrow
    assert len(engine.graphs.graphs) == 2  # greedy and truncated


def test_graphs_see_weights_that_were_updated_in_place_and_notice_those_that_moved():
    model = random_model("qwen3").cuda()
    engine = Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=4)
    engine.generate(PROMPTS, 2, Sampling(max_tokens=40, stop=()))
    graphs = engine.graphs
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert gap(model, engine.generate(PROMPTS, 2, Sampling(max_tokens=40, stop=()))) < 1e-3
    assert engine.graphs is graphs
    for weight in model.parameters():
        weight.data = weight.data * 0.9
    assert gap(model, engine.generate(PROMPTS, 2, Sampling(max_tokens=40, stop=()))) < 1e-3
    assert engine.graphs is not graphs


def test_a_long_window_and_a_model_that_asks_the_host(capsys):
    model = random_model("mistral").cuda()
    kv = KV(policy="snapkv", budget=128, interval=16, window=64, sinks=2, protect_prompt=False)
    assert gap(model, Engine(model, kv, slots=4).generate(PROMPTS, 2, Sampling(max_tokens=150, stop=()))) < 1e-3
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: (float(args[0].sum()), forward(*args, **kwargs))[1]
    engine = Engine(model, KV(policy="rkv", protect_prompt=False, **SMALL), slots=4)
    assert gap(model, engine.generate(PROMPTS, 2, Sampling(max_tokens=60, stop=()))) < 1e-3
    assert not engine.use_graphs and "cannot be captured in a CUDA graph" in capsys.readouterr().err
