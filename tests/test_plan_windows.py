"""Plans of models with sliding windows: the bytes of windows, weights and activations are those that a run allocates."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_rl import Engine, Sampling
from sparse_rl.config import Config, LoraConfig
from sparse_rl.kernels.form import AttentionForm
from sparse_rl.models import attention
from sparse_rl.models.actor import Actor
from sparse_rl.plan import make_plan, parts
from sparse_rl.plan.dimensions import Dimensions, from_config
from sparse_rl.plan.memory import cache_parts
from sparse_rl.plan.roofline import GPUS, decode_step_s, mean_in_window, pairs, step_time
from sparse_rl.train import memory
from sparse_rl.train.memory import budgets_that_fit, plan_run, reserve_step
from test_plan import compile_as_on_a_gpu, kept_bytes
from test_windows import FAMILIES, LONG, SHORT, WINDOW, family

WIDER = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "head_dim": 8}


def dims_of(name: str, **changes) -> Dimensions:
    return from_config(FAMILIES[name].to_dict() | changes, name)


def run_of(policy: str = "rkv", *, protect: bool = False, stored: str = "auto", slots: int = 4, **rollout) -> Config:
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 3, "max_tokens": 80, "slots": slots}
    kept = {"budget": 24, "interval": 8, "window": 4, "sinks": 2}
    return Config(
        model={"dtype": "float32"},
        kv={"policy": policy, "protect_prompt": protect, "dtype": stored, **kept},
        rollout=sizes | rollout,
        optimizer={"updates_per_step": 1},
    )


# Weights


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(name, tied):
    config = copy.deepcopy(FAMILIES[name])
    config.update(WIDER | {"tie_word_embeddings": tied, "attention_bias": name not in ("mistral", "qwen2")})
    dims = from_config(config.to_dict(), name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dims.params == sum(weight.numel() for weight in model.parameters())
    assert dims.largest_weight == max(weight.numel() for weight in model.parameters())
    adapted = Actor(model, LoraConfig(rank=4, merge=False)).learner
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert dims.adapter_params("all-linear", 4) == trained


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_without_defaults_is_the_same_model(name):
    """A config.json on the hub may omit what transformers fills in: head sizes, layer types, tied embeddings."""
    config = type(FAMILIES[name])(num_hidden_layers=12, **({"use_sliding_window": True} if name == "qwen2" else {}))
    whole = config.to_dict()
    kept = ("model_type", "use_sliding_window", "max_position_embeddings", *(key for key in whole if key.startswith("num_")))
    bare = {key: whole[key] for key in (*kept, "vocab_size", "hidden_size", "intermediate_size") if key in whole}
    assert from_config(bare, name) == from_config(whole, name)


def test_a_token_uses_few_experts_and_a_batch_most():
    dims = dims_of("gpt-oss")
    idle = dims.weights.routed // 2
    assert dims.active_params == dims.params - dims.embedding_params - idle
    assert dims.read_params(1) == pytest.approx(dims.active_params)
    assert dims.read_params(10**6) == pytest.approx(dims.active_params + idle)


def test_a_model_with_other_weights_than_its_text_is_not_planned(monkeypatch):
    """For example one with a vision tower, which shares the text model's configuration."""
    monkeypatch.setattr(memory, "room_bytes", lambda device: 2**30)
    model = family("gemma3")
    monkeypatch.setattr(type(model), "device", torch.device("cuda:0"))
    assert plan_run(run_of(), model, 57) is not None
    model.tower = torch.nn.Linear(3, 3)
    assert plan_run(run_of(), model, 57) is None


# Keys and values


@pytest.mark.parametrize("policy", ["rkv", "full", "protected"])
@pytest.mark.parametrize(
    ("name", "window", "stored"),
    [
        *((name, WINDOW, "auto") for name in FAMILIES),
        *(("mistral", 4096, "auto"), ("gemma3", 4096, "auto"), ("gpt-oss", WINDOW, "4bit")),
    ],
)
def test_planned_keys_and_values_are_those_in_storage(name, policy, window, stored):
    """Also if the window is wider than every sequence: rings then hold the longest sequence. They are never quantised."""
    model = family(name, sliding_window=window)
    config = run_of("full" if policy == "full" else "rkv", protect=policy == "protected", stored=stored)
    dims, rollout = from_config(model.config.to_dict(), name), config.rollout
    plan = make_plan(config, dims, prompt_tokens=len(LONG))
    planned = cache_parts(plan.config, dims, plan.slots, len(LONG), plan.pages)
    engine = Engine(model, config.sampler_kv, slots=plan.slots)
    reserve_step(engine, config, plan, len(LONG))
    of_keys = ("KV cache", "prompt store", "sliding windows")
    assert sum(planned.get(part, 0) for part in of_keys) == engine.cache.kv_bytes
    rings = engine.cache.windows
    assert planned["sliding windows"] == rings.keys_lSHCD.nbytes + rings.values_lSHCD.nbytes
    assert planned["positions, queries"] == engine.cache.side_bytes - engine.cache.lengths_S.nbytes
    limits = [72 if policy == "full" else 32, *[8] * 5]  # one response fills a page or is compacted, two of the others wait
    engine.generate([SHORT, LONG], 3, Sampling(max_tokens=rollout.max_tokens, stop=()), limits=limits)
    assert engine.stats.peak_kv_bytes == engine.cache.kv_bytes  # sampling allocates no more
    for phase in plan.phases:
        assert {part: phase.parts[part] for part in planned} == planned


@pytest.mark.parametrize(("policy", "gib"), [("rkv", 0.8), ("full", 1.5)])
def test_automatic_slots_and_budgets_follow_the_windows(policy, gib):
    """A model that is not planned keeps 64 slots at every automatic budget. These are planned."""
    dims = dims_of("gemma3", sliding_window=64, head_dim=256, num_hidden_layers=12, layer_types=None)
    config = run_of(policy, slots="auto", prompts_per_step=64, samples_per_prompt=8, max_tokens=2048)
    plan = make_plan(config, dims, memory_bytes=int(gib * 2**30), prompt_tokens=100)
    assert plan.fits and 1 < plan.slots < 512
    more = make_plan(config, dims, memory_bytes=plan.memory_bytes, prompt_tokens=100, slots=plan.slots + 1)
    assert not more.fits
    wider = dims_of("gemma3", sliding_window=256, head_dim=256, num_hidden_layers=12, layer_types=None)
    fewer = make_plan(config, wider, memory_bytes=plan.memory_bytes, prompt_tokens=100)
    assert fewer.fits and fewer.slots < plan.slots
    if policy == "rkv":
        auto = config.model_copy(update={"kv": config.kv.model_copy(update={"budget": "auto"})})
        budgets = budgets_that_fit(auto, plan, 100)
        slots = [memory.plan_budget(auto, plan, budget).slots for budget in budgets]
        assert len(set(slots)) > 2 and slots == sorted(slots, reverse=True)


# Activations and time


@pytest.mark.parametrize(
    ("name", "rank", "compiled"),
    [
        *((name, rank, False) for name in FAMILIES if name not in ("mistral", "qwen2") for rank in (0, 4)),
        *(("gemma2", 0, True), ("cohere2", 0, True), ("gpt-oss", 0, True)),
    ],
)
def test_activations_are_what_autograd_keeps(name, rank, compiled, monkeypatch):
    """With plain attention: on a GPU, kernels compute soft caps and sinks without scores."""
    monkeypatch.setattr(attention, "AttentionForm", lambda *form: AttentionForm())
    if compiled:
        compile_as_on_a_gpu(monkeypatch)
    config = copy.deepcopy(FAMILIES[name])
    config.update(WIDER)
    run = Config(model={"dtype": "bfloat16", "lora": {"rank": rank}})
    layers = [kept_bytes(config, count, rank) for count in (2, 3)]
    planned = parts.kept_per_token(run, from_config(config.to_dict(), name))
    assert planned == pytest.approx((layers[1] - layers[0]) / 64, rel=0.06)


def test_windows_take_less_time():
    assert mean_in_window(64, 100, 50) == 64 and mean_in_window(64, 10, 20) == 20
    steps = [min(64, 10 + step) for step in range(201)]
    assert mean_in_window(64, 10, 200) == pytest.approx(sum(steps) / len(steps), rel=0.01)
    seen = sum(min(64, query + 1) for query in range(500))
    assert pairs(500, 64) == pytest.approx(seen, rel=0.01) and pairs(500, None) == pairs(500, 600) == 500**2 / 2
    config = run_of("full", max_tokens=2000)
    narrow, wide = (make_plan(config, dims_of("gemma3", sliding_window=size), prompt_tokens=57) for size in (64, 1024))
    gpu = GPUS["h200"]
    assert decode_step_s(narrow, gpu) < decode_step_s(wide, gpu)
    assert step_time(narrow, gpu).update_s < step_time(wide, gpu).update_s
