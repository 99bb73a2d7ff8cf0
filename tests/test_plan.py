"""The plan: what it counts is what there is, more of anything takes more, and whoever it cannot help it tells why."""

import itertools
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from small_runs import cpu_of_children, refused
from sparse_rl import sizes
from sparse_rl.bench import step as bench_step
from sparse_rl.cli import build_parser, main
from sparse_rl.config import KV, Config, LoraConfig, from_flags, recipe, recipe_names
from sparse_rl.errors import UserError
from sparse_rl.evaluate import slots as evaluate_slots
from sparse_rl.gpu_memory import room_bytes
from sparse_rl.kernels import shadow
from sparse_rl.kv import cache
from sparse_rl.kv.policies import POLICIES
from sparse_rl.kv.prompt_store import PromptStore
from sparse_rl.kv.shape import CacheShape
from sparse_rl.kv.storage import KeyScales, Quantiser
from sparse_rl.models import compile as compiler
from sparse_rl.models import load
from sparse_rl.models.actor import Actor
from sparse_rl.models.shapes import SHAPES, random_model
from sparse_rl.plan import dimensions, make_plan, parts, remedies
from sparse_rl.plan.dimensions import from_config
from sparse_rl.plan.evaluation import evaluation_times
from sparse_rl.plan.memory import RESERVED_SHARE, largest_budget, peak_held, step_phases
from sparse_rl.plan.output import parse_size
from sparse_rl.plan.parts import gradient_bytes, resident
from sparse_rl.plan.remedies import sentence
from sparse_rl.plan.roofline import GPUS, communication, decode_s, decode_step_s, find_gpu, step_time
from sparse_rl.train.distributed import refuse_too_large
from sparse_rl.train.memory import checkpointed_layers, dense_slots, out_of_memory, peak_line, slots_of

GIB = 2**30
SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
MODELS = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SMALL, num_key_value_heads=3, attention_bias=True, mlp_bias=True, head_dim=16),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SMALL, num_key_value_heads=6, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=24, tie_word_embeddings=False),
    "mistral": MistralConfig(**SMALL, num_key_value_heads=1, head_dim=48, sliding_window=None),
}


def on_meta(config, dtype=torch.bfloat16):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def planned(*flags, model="1.5B", memory_gib=24.0, **options):
    args = build_parser().parse_args(["plan", model, *flags])
    base = {"model": {"path": model, "dtype": "bfloat16"}, "kv": {"policy": "rkv", "protect_prompt": False}}
    config = from_flags(args, Config, base)
    return make_plan(config, dimensions(model), memory_bytes=int(memory_gib * GIB), **options)


# What is counted


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    config = MODELS[name]
    dims = from_config(config.to_dict(), name)
    model = on_meta(config)
    assert dims.params == sum(weight.numel() for weight in model.parameters())
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    assert dims.active_params == dims.params - embedding
    adapted = Actor(model, LoraConfig(rank=4, merge=False)).learner
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert dims.adapter_params("all-linear", 4) == sum(weight.numel() for weight in trained)
    assert {weight.dtype for weight in trained} == {torch.float32}  # the plan gives adapters four bytes and no masters


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_of_named_shapes(shape):
    model = random_model(shape, dtype=torch.bfloat16, device="meta", seed=0)  # the model of the benchmarks
    assert dimensions(shape).params == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stored", ["auto", "8bit", "4bit"])
@pytest.mark.parametrize(("model", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16), ("mistral", torch.float16)])
def test_the_cache_is_what_is_allocated(policy, model, dtype, stored):
    """The same function gives the bytes of a slot to the plan, by dimensions, and to an evaluation, by the cache's shape."""
    dims = from_config(MODELS[model].to_dict(), model)
    shape = CacheShape(dims.layers, dims.q_heads, dims.kv_heads, dims.head_dim, dtype, torch.device("cpu"))
    kv = KV(policy=policy, budget=40, interval=8, dtype=stored, protect_prompt=False)
    scales = KeyScales.unset(shape.layers, shape.kv_heads, shape.head_dim, shape.device)
    quantiser = Quantiser(stored, scales) if kv.quantised else None
    capacity = kv.capacity if policy != "full" else sizes.DENSE_SLOT_TOKENS
    ring = kv.recent if POLICIES[policy].uses_queries else 0
    made = cache.SlotCache(shape, 3, capacity, ring, quantiser=quantiser)
    keys, beside = sizes.slot_bytes(dims, kv, dtype.itemsize)
    assert (keys, beside) == sizes.slot_bytes(shape, kv, dtype.itemsize)
    assert 3 * keys == made.kv_bytes == 3 * capacity * sizes.token_bytes(shape, dtype.itemsize, stored)
    assert 3 * beside == made.side_bytes - made.lengths_S.nbytes


def test_a_quantised_cache_is_planned_with_its_bytes():
    """Fewer bytes give more slots, and a decode step reads fewer."""
    flags = ["--kv.protect-prompt", "true", "--rollout.prompts-per-step", "64"]
    plans = {
        dtype: planned(*flags, "--kv.dtype", dtype, memory_gib=80, prompt_tokens=1100) for dtype in ("auto", "8bit", "4bit")
    }
    of_token = {dtype: sizes.token_bytes(plan.dims, 2, dtype) for dtype, plan in plans.items()}
    assert [each / of_token["auto"] for each in of_token.values()] == [1, (128 + 2) / 256, (64 + 4 * 2) / 256]
    for dtype, plan in plans.items():
        parts = plan.phases[0].parts
        assert parts["KV cache"] == plan.slots * 640 * of_token[dtype] and parts["prompt store"] % of_token[dtype] == 0
    slots = [plan.slots for plan in plans.values()]
    times = [decode_step_s(plan, find_gpu("H200"), slots=256) for plan in plans.values()]
    assert slots == sorted(slots) and times == sorted(times, reverse=True) and times[0] > times[2]


def test_the_prompt_store_is_what_is_allocated():
    """The plan counts the pages that a run reserves, and slots hold response tokens alone."""
    flags = ["--kv.protect-prompt", "true", "--rollout.prompts-per-step", "32", "--rollout.samples-per-prompt", "8"]
    plan = planned(*flags, memory_gib=500, prompt_tokens=1100, slots=256)
    rollout, dims = plan.config.rollout, plan.dims
    shape = CacheShape(dims.layers, dims.q_heads, dims.kv_heads, dims.head_dim, torch.bfloat16, torch.device("meta"))
    pages = sizes.pool_pages([1100] * rollout.prompts_per_step, 256, rollout.samples_per_prompt)
    store = PromptStore(shape, 256, pages, 1100)
    free = planned(*flags[2:], memory_gib=500, prompt_tokens=1100, slots=256)
    for ours, theirs in zip(plan.phases, free.phases, strict=True):
        assert ours.parts["prompt store"] == store.kv_bytes == 32 * 18 * 64 * sizes.token_bytes(dims, 2)
        assert theirs.parts["prompt store"] == 0
        assert ours.parts["KV cache"] == theirs.parts["KV cache"]
        assert ours.parts["positions, queries"] == theirs.parts["positions, queries"] + store.side_bytes
    reads, before = decode_step_s(plan, find_gpu("H200")), decode_step_s(free, find_gpu("H200"))
    held = 256 * sizes.token_bytes(dims, 2) * 1100 / (find_gpu("H200").bandwidth * 0.9)
    # Read once. Measured: 0.42 with all samples of each prompt, 0.65 with 1 to 8.
    assert 0.4 * held < reads - before < 0.7 * held
    lean = ["--optimizer.gradient-checkpointing", "--optimizer.state", "8bit", "--optimizer.tokens-per-microbatch", "5200"]
    fewer, more = (planned(*lean, *each, memory_gib=22, prompt_tokens=1100) for each in (flags, flags[2:]))
    assert fewer.fits and 1 < fewer.slots < more.slots < 256
    assert not planned(*lean, *flags, memory_gib=22, prompt_tokens=1100, slots=fewer.slots + 1).fits


def test_a_dense_cache_is_a_pool_of_pages_in_what_is_free():
    """Slots need the live tokens of responses of any length. The pool takes the rest of the memory, until no sequence waits."""
    lean = ["--method", "dense", "--optimizer.gradient-checkpointing", "--optimizer.state", "8bit"]
    lean += ["--optimizer.tokens-per-microbatch", "5200", "--rollout.max-tokens", "4096"]
    plan = planned(*lean, memory_gib=24)
    rollout, dims, live = plan.config.rollout, plan.dims, 32 / 8 * 4 + 32 * 22  # prompts once per group, a third of a response
    shape = CacheShape(dims.layers, dims.q_heads, dims.kv_heads, dims.head_dim, torch.bfloat16, torch.device("meta"))
    assert plan.fits and sizes.live_dense_pages(256, 4096, 32, 8) == live
    assert plan.pages >= sizes.live_dense_pages(256, 4096, plan.slots, 8)
    assert not planned(*lean, memory_gib=24, slots=plan.slots + 1).fits
    store = PromptStore(shape, plan.slots, plan.pages, 256 + 4096, responses=True)
    made = cache.SlotCache(shape, plan.slots, sizes.DENSE_SLOT_TOKENS)
    for phase in plan.phases:
        assert phase.parts["KV cache"] == store.kv_bytes + made.kv_bytes and not phase.parts["prompt store"]
        assert phase.parts["positions, queries"] == store.side_bytes + made.side_bytes - made.lengths_S.nbytes
    few = planned(*lean, memory_gib=24, slots=8)
    assert few.slots == few.running == 8 and few.pages == sizes.dense_pages([256] * 128, 4096, 8, 8)  # all that eight can use
    assert few.needed_bytes < plan.needed_bytes <= plan.memory_bytes
    half = planned(*lean, memory_gib=24, slots=plan.slots // 2)
    assert half.fits and half.free_bytes < 0.01 * half.memory_bytes
    assert half.pages > sizes.live_dense_pages(256, 4096, half.slots, 8)
    longer = planned(*lean, "--rollout.max-tokens", "8192", "--optimizer.tokens-per-microbatch", "8448", memory_gib=24)
    assert plan.running <= plan.slots and longer.fits
    assert planned(*lean, memory_gib=500, slots=64).pages == sizes.dense_pages([256] * rollout.prompts_per_step, 4096, 64, 8)


@pytest.mark.parametrize("flag", ["--gpu-memory", "--host-memory"])
def test_a_size_without_a_unit_is_refused_before_anything_is_printed(flag, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "1.5B", flag, "4"])
    told = capsys.readouterr()
    assert told.out == "" and "'4' is not a valid size: use a number and a unit, such as 24GiB or 24GB." in told.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], None),
        (["--max-tokens", "32512"], None),
        (["--max-tokens", "32513"], "--rollout.max-tokens 32512 fits."),
        (["--prompt-tokens", "32768"], "use shorter prompts."),
    ],
)
def test_lengths_beyond_the_context_are_not_planned_in_silence(flags, said, capsys):
    """`train` refuses them, however much memory there is."""
    main(["plan", "1.5B", *flags])
    out = capsys.readouterr().out
    assert ("exceed the model's context of 32,768, so train refuses them" in out) is (said is not None)
    assert said is None or said in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv.budget", "2000", "--rollout.max-tokens", "48"], True),
        (["--kv.budget", "2000", "--rollout.max-tokens", "4096"], False),
        (["--kv.budget", "auto", "--rollout.max-tokens", "4096"], False),
        (["--kv.budget", "128", "--kv.protect-prompt", "false"], False),
        (["--kv.budget", "100", "--kv.interval", "256", "--rollout.max-tokens", "256"], True),
        (["--kv.budget", "auto", "--kv.interval", "256", "--rollout.max-tokens", "256"], True),
    ],
)
def test_a_budget_that_never_evicts_is_said(flags, said, capsys):
    """And nothing of the prompts, whose lengths are assumed."""
    main(["plan", "1.5B", "--gpu", "H200", *flags])
    out = capsys.readouterr().out
    assert ("never evicts: " in out) is said and "prompts are longer" not in out


@pytest.mark.parametrize("stored", ["auto", "8bit", "4bit"])
def test_long_prompts_are_planned_as_the_engine_reads_them(stored):
    """Once for their samples, from the number of keys on at which the engine does, and faster then. No token makes a step faster.
    An evaluation has one sample per prompt."""
    gpu, step_s, evaluation_s = find_gpu("H200"), {}, {}
    for samples, tokens in itertools.product((4, 8), (1024, 1025, 3025)):
        flags = ["--kv.protect-prompt", "true", "--kv.dtype", stored, "--rollout.slots", "64", "--rollout.max-tokens", "2048"]
        flags += ["--rollout.samples-per-prompt", str(samples), "--rollout.prompts-per-step", str(64 // samples)]
        flags += ["--data.test", "arithmetic", "--eval.cache", "sparse", "--eval.problems", "64", "--eval.slots", "64"]
        plan = planned(*flags, model="7B", memory_gib=141, prompt_tokens=tokens)
        step_s[samples, tokens] = decode_step_s(plan, gpu)
        evaluation_s[samples, tokens] = evaluation_times(plan, gpu)[0].seconds
        dims = plan.dims.full
        shape = CacheShape(dims.layers, dims.q_heads, dims.kv_heads, dims.head_dim, torch.bfloat16, torch.device("meta"))
        store = PromptStore(shape, 64, 64, 4096)
        store.choose_reads([tokens] * (64 // samples), samples)
        assert store.reads_once is (samples == 8 and tokens > 1024)
    assert step_s[8, 1024] == step_s[4, 1024] and step_s[8, 1025] < step_s[4, 1025]
    assert step_s[8, 1024] < step_s[8, 1025]
    assert step_s[8, 3025] - step_s[8, 1025] < 0.9 * (step_s[4, 3025] - step_s[4, 1025])
    assert all(evaluation_s[8, tokens] == evaluation_s[4, tokens] for tokens in (1024, 1025, 3025))


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "samples"), [(8, 7, 8), (100, 48, 2), (100, 64, 8), (256, 48, 8)])
def test_all_slots_of_a_dense_cache_run_if_no_sequence_waits_for_pages(prompt_tokens, max_tokens, samples):
    """Slots hold short sequences without any page for the response, and share the full pages of a prompt."""
    flags = ["--method", "dense", "--rollout.max-tokens", str(max_tokens), "--rollout.samples-per-prompt", str(samples)]
    plan = planned(*flags, memory_gib=140, prompt_tokens=prompt_tokens)
    assert plan.pages == sizes.dense_pages([prompt_tokens] * 128, max_tokens, plan.slots, samples)
    assert plan.running == plan.slots == 128 * samples


@pytest.mark.parametrize("protect", ["true", "false"])
def test_the_largest_budget_ends_at_the_longest_sequence_or_at_the_budget_of_the_run(protect):
    """With memory for any, a larger one than the longest sequence would never evict."""
    flags = ["--kv.protect-prompt", protect, "--rollout.max-tokens", "300"]
    kept = 300 if protect == "true" else 400
    assert largest_budget(planned(*flags, "--kv.budget", "64", memory_gib=140, prompt_tokens=100)) == kept
    assert largest_budget(planned(*flags, "--kv.budget", "512", memory_gib=140, prompt_tokens=100)) == 512


def test_the_largest_budget_fits_and_one_more_token_does_not():
    flags = ["--rollout.slots", "256", "--rollout.max-tokens", "4096", "--optimizer.tokens-per-microbatch", "4400"]
    plan = planned(*flags, "--model.lora.rank", "16", memory_gib=16)
    budget = largest_budget(plan)
    assert plan.fits and plan.config.kv.kept_tokens < budget < 4096
    assert [plan.replanned(plan.config.with_budget(each)).fits for each in (budget, budget + 1)] == [True, False]


def test_the_prompts_of_an_evaluation_fill_the_slots():
    """An evaluation has one sample per prompt. Its prompt store has a prompt for every slot, below the peak of a step."""
    flags = ["--kv.protect-prompt", "true", "--rollout.prompts-per-step", "32", "--rollout.samples-per-prompt", "8"]
    flags += ["--data.test", "arithmetic", "--eval.cache", "sparse", "--eval.problems", "200"]
    roomy = planned(*flags, memory_gib=140, prompt_tokens=1100, slots=256)
    assert roomy.evaluation_pages == sizes.pool_pages([1100] * 200, 256, 1) >= 200 * 18
    without = planned(*flags, "--eval.problems", "0", memory_gib=140, prompt_tokens=1100, slots=256)
    assert without.evaluation_pages == 0 and without.peak_bytes == roomy.peak_bytes
    assert [each.slots for each in evaluation_times(roomy, find_gpu("H200"))] == [200]
    assert planned(*flags, "--eval.problems", "32", memory_gib=140, prompt_tokens=1100, slots=256).evaluation_pages == 0
    lean = [*flags, "--model.lora.rank", "16", "--rollout.max-tokens", "64", "--optimizer.tokens-per-microbatch", "1164"]
    small, alone = (planned(*lean, *more, prompt_tokens=1100, slots=256) for more in ([], ["--eval.problems", "0"]))
    assert small.evaluation_pages < roomy.evaluation_pages and small.peak_bytes == alone.peak_bytes


def test_policies_with_a_ring_of_queries_are_named_for_the_plan():
    assert set(sizes.QUERY_POLICIES) == {name for name, policy in POLICIES.items() if policy.uses_queries}


@pytest.mark.parametrize("policy", ["my_module:Mine", "pkg.mod.Mine", "large-values"])
def test_a_custom_policy_is_counted_with_a_ring_of_queries(policy):
    """However it is named: by a path, or by an entry point."""
    sampling = [planned("--kv.policy", each).phases[1].parts for each in (policy, "rkv", "streaming")]
    assert sampling[0] == sampling[1] and sum(sampling[0].values()) > sum(sampling[2].values())


def limits_of(name, device="cuda:0", **windows):
    dims = dimensions(name)
    shape = CacheShape(
        dims.layers, dims.q_heads, dims.kv_heads, dims.head_dim, torch.bfloat16, torch.device(device), **windows
    )
    return shape, dims.vocab, SimpleNamespace(limits=SimpleNamespace(shape=shape, vocab=dims.vocab))


def test_an_evaluation_leaves_room_for_its_prompts(monkeypatch):
    shape, vocab, probe = limits_of("1.5B")
    kv, prompts = KV(policy="rkv", protect_prompt=True), [1000] * 300

    def needed(slots, samples):
        keys, _ = sizes.slot_bytes(shape, kv, 2)
        return slots * (keys + 4 * vocab) + sizes.store_bytes(shape, prompts, slots, samples, 2)[0]

    monkeypatch.setattr(evaluate_slots, "free_bytes", lambda device: 8 * 2**30)
    for samples in (1, 8):
        slots = evaluate_slots.auto_slots(probe, kv, 5000, prompts, samples)
        assert needed(slots, samples) <= evaluate_slots.SHARE * 8 * 2**30 < needed(slots + 1, samples)


@pytest.mark.parametrize(("policy", "slots"), [("rkv", 123), ("full", 37)])
def test_an_evaluation_takes_the_slots_that_fit_the_free_memory(policy, slots, monkeypatch):
    shape, vocab, probe = limits_of("1.5B")
    kv, tokens = KV(policy=policy, protect_prompt=False), 4096
    keys, _ = sizes.slot_bytes(shape, kv, 2)
    if policy == "full":  # the prompt, a third of the longest response, and the newest tokens
        keys += (4 + 22) * 64 * sizes.token_bytes(shape, 2)
    free = int((keys + 4 * vocab) * (slots + 0.5) / evaluate_slots.SHARE)
    monkeypatch.setattr(evaluate_slots, "free_bytes", lambda device: free)
    assert evaluate_slots.auto_slots(probe, kv, tokens, [256] * 500, 1) == slots
    assert evaluate_slots.auto_slots(limits_of("1.5B", "cpu")[2], kv, tokens, [256] * 500, 1) == 64


def test_an_evaluation_leaves_room_for_windows(monkeypatch):
    """Of 28 layers, 21 hold at most 1,024 tokens, whatever the budget."""
    shape, vocab, probe = limits_of("1.5B", window=1024, windowed=tuple(range(21)))
    of_layer = sizes.token_bytes(shape, 2) // 28
    for tokens, held in ((4096, 1024), (500, 768)):  # 256 + 500 tokens take whole pages
        of_slot = (7 * KV(policy="rkv", protect_prompt=False).capacity + 21 * held) * of_layer + 4 * vocab
        monkeypatch.setattr(evaluate_slots, "free_bytes", lambda device, size=of_slot: int(30.5 * size / evaluate_slots.SHARE))
        assert evaluate_slots.auto_slots(probe, KV(policy="rkv", protect_prompt=False), tokens, [256] * 500, 1) == 30


@pytest.mark.parametrize("tokens", [100, 300])
def test_lists_of_blocks_are_what_a_shadow_pass_holds(tokens):
    dims = from_config(MODELS["qwen2"].to_dict(), "qwen2")
    made = shadow.Shadow(torch.full((dims.layers, dims.kv_heads, tokens), tokens, dtype=torch.int32))
    assert made.padded == sizes.padded_length(tokens)
    held = sum(each.nbytes for each in made.lists.values())
    mask = made.block_mask(0, dims.q_heads)
    kept = sum(getattr(mask, name).nbytes for name in made.lists)
    for layers in (1, dims.layers):
        assert parts.block_list_bytes(dims, made.padded, layers) == held + layers * kept


@pytest.mark.parametrize(
    ("name", "rank", "compiled"),
    [
        *((name, rank, False) for name in ("qwen2", "qwen3") for rank in (0, 4)),
        *(("qwen3", 0, True), ("qwen2", 4, True)),
    ],
)
def test_activations_are_what_autograd_keeps(name, rank, compiled, monkeypatch):
    """In half precision; a layer more keeps so much more. Compiled as for a GPU up to the kernels, which need a compiler.
    Qwen3 has all that Llama has, and norms of queries and keys."""
    if compiled:
        compile_as_on_a_gpu(monkeypatch, any_length=not rank)
    dims = from_config(MODELS[name].to_dict(), name)
    config = Config(model={"dtype": "bfloat16", "lora": {"rank": rank}})
    layers = [kept_bytes(MODELS[name], count, rank) for count in (2, 3)]
    assert parts.kept_per_token(config, dims) == pytest.approx((layers[1] - layers[0]) / TOKENS, rel=0.05)


TOKENS = 64


def compile_as_on_a_gpu(monkeypatch, *, any_length=False):
    """Compile layers up to their kernels. Layers for any length keep the same tensors but take four times as long to trace."""
    how = {"backend": "aot_eager_decomp_partition", "dynamic": any_length}
    monkeypatch.setattr(compiler, "fuses", lambda device: True)
    monkeypatch.setattr(compiler, "_compiled", lambda plain, **_: torch.compile(plain, **how))
    for module in (compiler, parts):
        monkeypatch.setattr(module, "WORTH_COMPILING", 0)


def kept_bytes(config, layers, rank):
    from sparse_rl.learner.replay import forward
    from sparse_rl.rollout.rollout import Rollout

    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    model = Actor(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), LoraConfig(rank=rank, merge=False)
    ).learner
    model.enable_input_require_grads()  # else the first layer of a model with adapters is compiled apart
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, lest its place is used again
        return tensor

    response = [token % 7 for token in range(TOKENS)]
    rollout = Rollout([1], response, torch.zeros(TOKENS), "length", 0, 1.0, 0, None)
    forward(model, [rollout], "dense")
    with compiler.fused_layers(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, [rollout], "dense")
    return sum(count for count, _ in seen.values())


# What follows from it


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (["--rollout.slots", "8"], ["--rollout.slots", "9"]),
        (["--kv.budget", "256"], ["--kv.budget", "257"]),
        (["--rollout.max-tokens", "4096"], ["--rollout.max-tokens", "8192"]),
        (["--optimizer.tokens-per-microbatch", "8192"], ["--optimizer.tokens-per-microbatch", "16384"]),
        (["--optimizer.gradient-checkpointing"], ["--optimizer.gradient-checkpointing", "false"]),
        (["--optimizer.state", "offload"], ["--optimizer.state", "8bit"]),
        (["--optimizer.state", "8bit"], ["--optimizer.state", "fp32"]),
        (["--model.lora.rank", "16"], []),
        (["--model.lora.rank", "16", "--model.lora.merge", "false"], ["--model.lora.rank", "16"]),
        (["--model.dtype", "bfloat16", "--optimizer.state", "offload"], ["--model.dtype", "float32"]),
        ([], ["--loss.kl-coef", "0.1"]),
        (["--method", "sparse_rl"], ["--method", "dense"]),
        (["--method", "sparse_rl"], ["--method", "smd"]),
    ],
    ids=str,
)
def test_more_takes_more(less, more):
    slots = None if "--rollout.slots" in less else 64
    small, large = (planned(*flags, memory_gib=500, slots=slots).needed_bytes for flags in (less, more))
    assert small < large


def test_auto_slots_are_as_many_as_fit_and_one_more_does_not():
    flags = ["--optimizer.gradient-checkpointing", "--optimizer.state", "8bit", "--optimizer.tokens-per-microbatch", "4608"]
    plan = planned(*flags)
    assert plan.fits and 1 < plan.slots < 1024
    assert not planned(*flags, slots=plan.slots + 1).fits
    assert planned(*flags, memory_gib=500).slots == 1024  # all rollouts of the step, at most so many
    assert planned(*flags, "--rollout.prompts-per-step", "2", memory_gib=500).slots == 16
    assert planned(*flags, "--rollout.slots", "7").slots == 7
    assert planned(*flags, "--method", "dense").slots < plan.slots / 2


def test_as_few_layers_recompute_their_activations_as_fit():
    layers = dimensions("1.5B").layers
    flags = ["--optimizer.state", "8bit", "--rollout.slots", "64"]
    counts = [planned(*flags, memory_gib=gib).checkpointed_layers for gib in (500, 60, 50, 40, 30, 25, 1)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == layers and 0 < counts[3] < layers
    plan = planned(*flags, memory_gib=40)
    assert plan.fits and not any(
        planned(*flags, "--optimizer.gradient-checkpointing", word, memory_gib=40).checkpointed_layers
        == plan.checkpointed_layers
        for word in ("true", "false")
    )
    fewer = step_phases(plan.config, plan.dims, plan.slots, plan.prompt_tokens, plan.checkpointed_layers - 1)
    assert peak_held(fewer, plan.pool_bytes) > plan.memory_bytes / (1 + RESERVED_SHARE)
    cpu, cuda = (SimpleNamespace(device=torch.device(kind), config=MODELS["qwen2"]) for kind in ("cpu", "cuda"))
    assert checkpointed_layers(plan.config, plan, cuda) == plan.checkpointed_layers
    assert checkpointed_layers(plan.config, None, cuda) == cuda.config.num_hidden_layers  # not planned: as little as can be
    assert checkpointed_layers(plan.config, None, cpu) == 0


def test_slots_of_a_run():
    config, cpu, cuda = Config(), torch.device("cpu"), torch.device("cuda")
    assert slots_of(config, None, cpu) == 256
    assert slots_of(Config(rollout={"slots": 700}), None, cpu) == 700
    assert slots_of(Config(rollout={"prompts_per_step": 2}), None, cpu) == 16
    fits = planned("--optimizer.gradient-checkpointing", "--model.lora.rank", "16")
    assert fits.fits and slots_of(config, fits, cuda) == fits.slots
    assert slots_of(config, None, cuda) == 64
    assert slots_of(config, planned(memory_gib=2), cuda) == config.rollout.samples_per_prompt  # the preflight shows it


FITS_24 = ["--optimizer.gradient-checkpointing", "--model.lora.rank", "16", "--data.test", "arithmetic"]


@pytest.mark.parametrize("memory_gib", [16, 24, 140])
def test_an_evaluation_takes_nothing_from_a_run(memory_gib):
    """Its dense cache gets what stays free under a step's peak: as many slots, and no more memory, than without it."""
    plan = planned(*FITS_24, memory_gib=memory_gib)
    without = planned(*FITS_24, "--eval.problems", "0", memory_gib=memory_gib)
    assert plan.fits and plan.slots == without.slots
    assert (plan.peak_bytes, plan.needed_bytes) == (without.peak_bytes, without.needed_bytes)
    assert 1 < plan.evaluation_slots <= 256 and without.evaluation_slots == 0
    assert planned(*FITS_24, "--eval.problems", "2", memory_gib=memory_gib).evaluation_slots == 2
    assert planned(*FITS_24, "--eval.slots", "7", memory_gib=memory_gib).evaluation_slots == 7  # as asked, whatever it takes
    for own in (["--method", "dense"], ["--kv.policy", "full"]):
        assert planned(*FITS_24, *own, memory_gib=memory_gib).evaluation_slots == 0


def test_slots_of_an_evaluation():
    sampler = SimpleNamespace(cache=SimpleNamespace(kv_bytes=64 * 640 * 28_672, dense_token_bytes=28_672))
    assert dense_slots(None, sampler, 4096) == 10 and dense_slots(None, sampler, 10**6) == 1  # as many bytes as the sampler's
    plan = planned(*FITS_24, prompt_tokens=256)
    assert dense_slots(plan, sampler, 256 + 4096) == plan.evaluation_slots
    assert dense_slots(plan, sampler, 2 * (256 + 4096)) == plan.evaluation_slots // 2  # its prompts are longer


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    """torch refuses "cuda" where it is asked for the share of memory that a process may take."""

    def share(device):
        if device.index is None:
            raise ValueError("Expected a torch.device with a specified index")
        return device.index / 4

    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (80, 100))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 10)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", share)
    assert room_bytes(torch.device("cuda")) == 75
    assert room_bytes(torch.device("cuda:1")) == 25


def test_out_of_memory_says_what_would_fit():
    flags = ["--optimizer.gradient-checkpointing", "--model.lora.rank", "16", "--rollout.slots", "1024"]
    text = str(out_of_memory(Config(), planned(*flags)))
    assert "24.0 GiB is too small for a training step, which needs " in text and "--rollout.slots " in text
    slots = text.split("--rollout.slots ")[1].split()[0].rstrip(",.")
    assert planned(*flags[:-1], slots).fits
    surprised = planned(*flags[:-1], "64")  # it should have fitted
    assert surprised.fits
    for remedy in remedies(surprised, find_gpu("RTX 4090"), ran_out=True):
        assert planned(*flags[:-1], "64", *remedy.flags.split()).needed_bytes <= 0.9 * surprised.needed_bytes
    assert "a smaller model or a larger GPU" in str(out_of_memory(Config(), planned(memory_gib=1)))
    never = Config(optimizer={"gradient_checkpointing": False})
    assert "--optimizer.gradient-checkpointing true, or" in str(out_of_memory(never))  # without a plan


def test_prediction_and_peak_are_put_side_by_side():
    line = peak_line({"memory/peak_gib": 20.0, "memory/predicted_gib": 21.0})
    assert line == "memory: peak 20.00 GiB, predicted 21.00 GiB (+5%)"


def test_a_decode_step_takes_its_roofline_and_the_latency_of_its_layers():
    """256 slots of 512 + 128 tokens on an H200: products of all slots, then one read of the 576.5 tokens a slot holds on
    average. An embedding that is looked up is not read."""
    for shape, params, token_bytes in (("1.5B", 1.54e9, 28 * 2 * 2 * 128 * 2), ("7B", 7.07e9, 28 * 2 * 4 * 128 * 2)):
        plan = planned(model=shape, memory_gib=140, slots=256)
        expected = 2 * params * 256 / (0.79 * 989e12) + 256 * 576.5 * token_bytes / (0.9 * 4.8e12) + 28 * 50e-6
        assert decode_step_s(plan, GPUS["h200"]) == pytest.approx(expected, rel=0.01)


MEASURED = Path(__file__).parents[1] / "benchmarks/results"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 0.89) for name in ("1.5B", "1.5B-8bit", "1.5B-triattention", "1.5B-full-8bit")),
        *((name, 0.74) for name in ("1.5B-full-4bit", "7B", "7B-8bit", "7B-4bit")),
    ],
)
def test_computed_decode_steps_take_at_most_as_long_as_measured_ones(name, least):
    """256 slots on an H200. Unpacking all keys from 4 bits takes time that is not counted, and products of 7B models are further
    from their peak than those of 1.5B."""
    arms = json.loads((MEASURED / f"rollout-{name}.json").read_text())["arms"]
    dims, timed = dimensions(name.split("-")[0]), [arm for arm in arms if arm.get("decode_tokens_per_s")]
    for arm in timed:
        dtype = next((bits for bits in ("8bit", "4bit") if bits in arm["name"]), "auto")
        step_s = decode_s(dims, arm["slots"], arm["held_tokens"], 2, GPUS["h200"], dtype)
        assert least < step_s * arm["decode_tokens_per_s"] / arm["slots"] < 1.05, arm["name"]
    assert timed


@pytest.mark.parametrize("name", ["36gb-64-full-dense", "34.5gb-64-full-dense", "34.5gb-64-full-best"])
def test_computed_sampling_under_a_cap_takes_about_as_long_as_measured(name):
    """64 rollouts of full length on an H200. Dense ones wait for pages under both caps, and the plan leaves out that those that
    wait are recomputed. Compressed ones never wait."""
    record = json.loads((MEASURED / f"step-1.5B-{name}.json").read_text())
    config = Config(**record["config"]).changed(method=record["arms"][0]["method"])
    memory_bytes = parse_size(record["memory_cap"])
    plan = make_plan(config, dimensions("1.5B"), memory_bytes=memory_bytes, prompt_tokens=record["prompt_tokens"])
    step, at = record["arms"][0]["steps"][-1], step_time(plan, GPUS["h200"])
    measured = sum(step[part] for part in ("prefill", "decode", "compaction", "host"))
    assert 0.8 < (at.prefill_s + at.decode_s) / measured < 1.1
    assert (plan.running < plan.slots) == (config.method == "dense"), (plan.running, plan.slots)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("A100-40", "A100 40GB"),
        ("NVIDIA RTX A6000", "A6000"),
        ("l40s", "L40S"),
    ],
)
def test_gpus_are_known_by_what_their_drivers_say(name, known):
    assert find_gpu(name).name == known


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA GH200 480GB", "NVIDIA A10G", "Tesla T4"])
def test_a_gpu_is_not_taken_for_one_with_a_similar_name(name):
    with pytest.raises(UserError, match="is unknown"):
        find_gpu(name)


# The recipes


CARDS = [name for name in recipe_names() if name.endswith("gb")]


def test_there_are_recipes_for_cards_of_16_and_24_gb():
    assert [name[-4:] for name in CARDS].count("24gb") == 5 and [name[-4:] for name in CARDS].count("16gb") == 1


def recipe_text(name):
    return (files("sparse_rl") / "recipes" / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", CARDS)
def test_recipes_fit_their_cards(name, capsys):
    memory = int(name[-4:-2])
    main(["plan", name, "--gpu-memory", f"{memory}GiB"])
    out = capsys.readouterr().out
    assert "The run fits: " in out
    config = Config(**recipe(name))
    said = re.search(r"the peak is ([\d.]+ GiB) with (\d+) slots", recipe_text(name))
    assert said and f"the peak is {said[1]}" in out and f"{said[2]} slots" in out
    assert config.kv.capacity == 640 and config.rollout.max_tokens == 4096
    plan = make_plan(config, dimensions(config.model.path), memory_bytes=(memory - 2) * GIB)
    assert plan.fits and plan.slots >= 32  # the cap of the measured proof


@pytest.mark.parametrize("name", CARDS)
def test_recipes_for_cards_run_dry(name, capsys):
    main(["train", name, "--dry-run", "--model.path", "tiny", "--data.train", "arithmetic"])  # its own are on the hub
    assert "first prompt, " in capsys.readouterr().out


# The command


@pytest.mark.parametrize(
    ("flags", "timed"),
    [
        ([], "H200 (assumed"),
        (["--gpu-memory", "24GiB"], "RTX 4090 (assumed"),
        (["--gpu-memory", "24GiB", "--gpu", "L4"], "L4, all responses at full length"),
    ],
)
def test_times_are_of_the_card_that_is_named_or_nearest(flags, timed, capsys):
    main(["plan", "1.5b-full-24gb", *flags])
    assert f"computed for {timed}" in " ".join(capsys.readouterr().out.split())


def test_the_plan_comes_at_once_and_without_torch(tmp_path):
    arguments = ["plan", "1.5B", "--gpu-memory", "24GiB", "--max-tokens", "8192", "--json", str(tmp_path / "plan.json")]
    code = (
        f"import sys; from sparse_rl.cli import main\nmain({arguments!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    started = cpu_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cpu_of_children() - started < 3  # a second on an idle machine
    assert "The run does not fit: " in done.stdout and "--optimizer." in done.stdout and "dense" in done.stdout
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["config"]["rollout"]["max_tokens"] == 8192 and not written["fits"]
    assert written["phases"]["update"]["weights"] == 2 * dimensions("1.5B").params


def test_sizes_carry_their_unit():
    assert parse_size("24GiB") == 24 * GIB and parse_size("24 gb") == 24 * 10**9 and parse_size("1.5GiB") == 3 * GIB // 2
    for text in ("24", "24GiBs", "GiB", "-3GB"):
        with pytest.raises(UserError, match="such as 24GiB"):
            parse_size(text)


def folder_with(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_an_unknown_model_is_told_what_it_lacks(tmp_path, capsys):
    known = MODELS["qwen2"].to_dict()
    lacking = {key: value for key, value in known.items() if key != "num_hidden_layers"}
    path = folder_with(tmp_path, **lacking)
    assert refused(capsys, "plan", path) == f"{path} cannot be planned: its config.json lacks num_hidden_layers."
    folder_with(tmp_path, model_type="mamba", vocab_size=97, hidden_size=48, num_hidden_layers=2)
    assert "MambaForCausalLM (mamba)" in refused(capsys, "plan", path)
    folder_with(tmp_path, **(known | {"model_type": "nothing"}))
    assert f"{path} is nothing, which plan does not support" in refused(capsys, "plan", path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is damaged: it is not JSON" in refused(capsys, "plan", path)
    (tmp_path / "config.json").unlink()
    assert "it has no config.json" in refused(capsys, "plan", path)
    assert "No model is named 'nowhere': pass a shape (" in refused(capsys, "plan", "nowhere")
    assert refused(capsys, "plan", "1.5b-ful-24gb") == "No model is named '1.5b-ful-24gb': did you mean 1.5b-full-24gb?"
    assert "did you mean RTX 4090?" in refused(capsys, "plan", "tiny", "--gpu", "RTX 4091")
    assert "did you mean 'rkv'?" in refused(capsys, "plan", "tiny", "--kv.policy", "rkvv")
    assert "Recipe 'nowhere.toml' does not exist" in refused(capsys, "plan", "nowhere.toml")
    assert "unknown argument --kv.bugdet" in refused(capsys, "plan", "tiny", "--kv.bugdet", "3")


def test_a_model_that_cannot_be_had_from_the_hub_is_named(monkeypatch, capsys):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    assert "nobody/nothing cannot be planned: its config.json is neither" in refused(capsys, "plan", "nobody/nothing")


# The benchmarks beside it


def test_bench_step_measures_every_phase(tmp_path, capsys):
    target = tmp_path / "step.json"
    main(["bench", "step", "tiny", "--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4",
          "--rollout.max-tokens", "32", "--kv.budget", "20", "--kv.interval", "8", "--kv.window", "4",
          "--prompt-tokens", "6", "--json", str(target)])  # fmt: skip
    record = json.loads(target.read_text())
    assert [arm["method"] for arm in record["arms"]] == ["sparse_rl", "dense"]
    for arm in record["arms"]:
        (step,) = arm["steps"]
        phases = sum(step[name] for name in ("prefill", "decode", "compaction", "host", "grade"))
        phases += step["old log-probs"] + step["update"] + step["sync"]
        assert 0 < phases <= step["step_s"] and 8 * 2 <= step["tokens"] <= 8 * 32
    assert record["arms"][0]["steps"][0]["tokens"] == record["arms"][1]["steps"][0]["tokens"]  # the same lengths


def test_bench_step_records_only_that_memory_ran_out(monkeypatch):
    def fail(error):
        monkeypatch.setattr(bench_step, "synthetic_trainer", Mock(side_effect=error))
        return bench_step.measure(Config(), None, 6, 1, uniform=True)

    error = out_of_memory(Config())
    assert fail(error) == {"fits": False, "why": str(error), "steps": []}
    with pytest.raises(UserError, match="does not exist"):
        fail(UserError("memory.jsonl does not exist."))


def test_bench_memory_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use sparse-rl plan, which computes the same" in refused(capsys, "bench", "memory", "0.5B")
    assert "remove the option" in refused(capsys, "bench", "step", "0.5B", "--memory-cap", "22GiB")


# A GPU that cannot do what it should


def test_a_gpu_without_bfloat16_falls_back_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(load, "notice", said.append)
    monkeypatch.setattr(load, "_cuda_works", lambda: True)
    monkeypatch.setattr(load, "_has_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert load.place(None, None) == ("float32", "cuda")
    assert len(said) == 1 and said[0].startswith(
        "Tesla T4 does not support bfloat16: the model runs in float32, which is slower and needs twice the memory."
    )
    assert load.place("bfloat16", None) == ("bfloat16", "cuda") and len(said) == 1  # as asked
    monkeypatch.setattr(load, "_has_bfloat16", lambda: True)
    assert load.place(None, None) == ("bfloat16", "cuda") and len(said) == 1


def test_a_driver_that_does_not_fit_is_named(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(load, "notice", said.append)
    monkeypatch.setattr(load, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert not load._cuda_works.__wrapped__()
    assert len(said) == 1 and "driver on your system is too old" in said[0] and "running on the CPU" in said[0]


# Several GPUs


def test_ranks_share_what_is_trained_and_each_has_a_whole_model_to_sample_from():
    one, eight = (
        Config(model={"path": "7B", "dtype": "bfloat16"}, rollout={"prompts_per_step": 64}, ranks={"count": count})
        for count in (1, 8)
    )
    dims = dimensions("7B")
    alone, shared = resident(one, dims), resident(eight, dims)
    assert shared["weights"] == alone["weights"] == 2 * dims.params
    for name in ("float32 masters", "optimizer moments"):
        assert shared[name] == pytest.approx(alone[name] / 8, rel=1e-6)
    held = gradient_bytes(eight, dims)
    released = gradient_bytes(
        eight.model_copy(update={"ranks": eight.ranks.model_copy(update={"hold_gradients": False})}), dims
    )
    assert held == pytest.approx(4 * dims.params * 9 / 8, rel=1e-6) and released < held / 3
    assert make_plan(eight, dims).slots == 8 * one.rollout.samples_per_prompt
    adapters = eight.model_copy(update={"model": eight.model.model_copy(update={"lora": LoraConfig(rank=8)})})
    assert resident(adapters, dims)["adapters"] == 4 * dims.adapter_params("all-linear", 8)


def test_more_slots_never_take_longer():
    """128 rollouts in 72 slots are 72 and then 56, in 124 slots 124 and then 4."""
    flags = ["--rollout.prompts-per-step", "16", "--rollout.samples-per-prompt", "8", "--rollout.slots"]
    times = [step_time(planned(*flags, str(slots)), GPUS["rtx 4090"]).decode_s for slots in (16, 63, 72, 124, 128)]
    assert times == sorted(times, reverse=True) and times[2] == pytest.approx(times[3])


def test_more_gpus_take_less_time_and_move_more():
    def at(count):
        config = Config(model={"path": "7B", "dtype": "bfloat16"}, rollout={"prompts_per_step": 64}, ranks={"count": count})
        plan = make_plan(config, dimensions("7B"), memory_bytes=130 * GIB)
        return step_time(plan, GPUS["h200"]), communication(plan)

    (one, nothing), (eight, within), (sixteen, between) = at(1), at(8), at(16)
    assert one.total_s > eight.total_s > sixteen.total_s
    assert nothing.gathered_bytes == one.sync_s == 0
    assert within.sync_s == pytest.approx(2 * dimensions("7B").params * 7 / 8 / 350e9)
    assert between.sync_s > 5 * within.sync_s


def test_a_model_too_large_for_one_gpu_is_refused():
    config = Config(model={"path": "72B", "dtype": "bfloat16"}, rollout={"prompts_per_step": 64}, ranks={"count": 64})
    with pytest.raises(
        UserError, match="72B has 135.4 GiB of weights, but the GPU has 80.0 GiB: the model is too large for one GPU"
    ):
        refuse_too_large(config, 80 * GIB)
    refuse_too_large(config, 160 * GIB)
    assert "too large for one GPU" in sentence(make_plan(config, dimensions("72B"), memory_bytes=32 * GIB))


def test_a_step_counts_every_pass_over_the_rollouts():
    """A reference's, the sampler's own view, and what Shadow Mask Distillation passes again."""

    def at(*flags):
        unshared = ("--rollout.max-tokens", "8192")  # responses that are too long to share their prompts in a pass
        return step_time(planned("--optimizer.gradient-checkpointing", "false", *unshared, *flags), GPUS["h200"])

    plain, reference = at(), at("--loss.kl-coef", "0.01")
    assert plain.old_s == 0 and reference.update_s == plain.update_s  # the training pass gives old log-probs
    forward = reference.old_s
    four = at("--optimizer.updates-per-step", "4")
    assert four.old_s == pytest.approx(0.75 * forward)  # the later updates need theirs before
    both = at("--loss.kl-coef", "0.01", "--correction.preset", "released", "--method", "sparse_rl")
    assert both.old_s == pytest.approx(2 * forward)  # its mean weight must be known before
    smd, taught = at("--method", "smd"), at("--method", "smd", "--loss.smd.direction", "shadow_to_dense")
    assert smd.old_s == pytest.approx(2 * forward) and smd.update_s == pytest.approx(2 * plain.update_s)
    assert taught.update_s == pytest.approx(plain.update_s * 4 / 3)


def test_a_plan_of_one_step_and_one_slot_has_singular_nouns(capsys):
    main(["plan", "0.5B", "--steps", "1", "--rollout.slots", "1", "--gpu-memory", "80GB", "--data.test", "gsm8k"])
    out = " ".join(capsys.readouterr().out.split())
    assert ", 1 slot, " in out and "1 step and 2 evaluations." in out
    assert not re.search(r"\b1 (steps|slots|evaluations)\b", out)
