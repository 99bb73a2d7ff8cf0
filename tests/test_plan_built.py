"""Plans of families without formulas: the plan counts the model that transformers builds from config.json, without values.

`test_model_table.py` compares weights, adapters, keys and states of every family with those of a model and its engine.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import HunYuanMoEV1Config, Qwen3_5Config, Qwen3_5TextConfig, Qwen3MoeConfig

from small_runs import refused
from sparse_rl import Engine
from sparse_rl.cli import main
from sparse_rl.config import Config
from sparse_rl.plan import make_plan, parts
from sparse_rl.plan.built import from_model
from sparse_rl.plan.dimensions import Dimensions, from_config
from sparse_rl.plan.memory import cache_parts
from sparse_rl.plan.output import ESTIMATED
from sparse_rl.plan.remedies import sentence
from sparse_rl.plan.roofline import BANDWIDTH_SHARE, GPUS, decode_s
from sparse_rl.sizes import token_bytes
from sparse_rl.train import memory
from sparse_rl.train.memory import checkpointed_layers, out_of_memory, plan_run, reserve_step, slots_of
from test_hybrid import LONG, family
from test_plan import kept_bytes
from test_plan_windows import run_of

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from families import RUNS

GIB = 2**30
SIZE = {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 32768}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
HYBRID = Qwen3_5TextConfig(**SIZE, **HEADS, intermediate_size=3072)
EXPERTS = Qwen3MoeConfig(**SIZE, **HEADS, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=4)


@pytest.fixture(scope="module")
def hybrid() -> Dimensions:
    return from_config(HYBRID.to_dict(), "hybrid")


@pytest.fixture(scope="module")
def experts() -> Dimensions:
    return from_config(EXPERTS.to_dict(), "experts")


@pytest.mark.parametrize("name", ["Qwen2 with windows", "Gemma 3", "Cohere 2", "gpt-oss"])
def test_the_counted_model_is_that_of_the_formulas(name):
    """So both ways to plan agree where both exist."""
    config = RUNS[name].to_dict()
    counted, formula = from_model(config, name), from_config(config, name)
    assert formula.counted is None and counted.weights == counted.counted
    for field in ("params", "in_layers", "largest_layer", "largest_weight", "embedding", "routed", "quantised"):
        assert getattr(counted.weights, field) == getattr(formula.weights, field), field
    assert set(counted.weights.linears) == set(formula.weights.linears)
    for field in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "vocab", "tied", "context", "window", "windowed"):
        assert getattr(counted, field) == getattr(formula, field), field
    for field in ("experts", "active_experts", "active_params", "needs_flex", "takes_codes", "takes_4bit_base"):
        assert getattr(counted, field) == getattr(formula, field), field


def test_values_that_json_lacks_are_read_from_the_file():
    """A saved config.json states infinity as {"__float__": "Infinity"}."""
    saved = RUNS["Nemotron-H"].to_json_string(use_diff=False)
    assert '"__float__"' in saved
    assert from_config(json.loads(saved), "saved") == from_config(RUNS["Nemotron-H"].to_dict(), "saved")


# Recurrent states


@pytest.mark.parametrize(("name", "policy"), [("qwen3.5", "full"), ("falcon-h1", "protected"), ("nemotron-h", "rkv")])
def test_planned_keys_and_states_are_those_in_storage(name, policy):
    """In falcon-h1, a layer has both attention and a state. In nemotron-h, some layers have neither."""
    model = family(name)
    config = run_of("full" if policy == "full" else "rkv", protect=policy == "protected")
    dims = from_config(model.config.to_dict(), name)
    plan = make_plan(config, dims, prompt_tokens=len(LONG))
    planned = cache_parts(plan.config, dims, plan.slots, len(LONG), plan.pages)
    engine = Engine(model, config.sampler_kv, slots=plan.slots)
    reserve_step(engine, config, plan, len(LONG))
    assert sum(planned[part] for part in ("KV cache", "prompt store", "recurrent states")) == engine.cache.kv_bytes
    assert planned["recurrent states"] == engine.cache.states.nbytes
    assert planned["positions, queries"] == engine.cache.side_bytes - engine.cache.lengths_S.nbytes
    for phase in plan.phases:
        assert {part: phase.parts[part] for part in planned} == planned


def test_states_of_half_precision_are_those_of_the_model():
    """Convolutions keep the model's dtype, states of linear attention are float32."""
    model = family("qwen3.5", torch.bfloat16)
    shape = Engine(model, run_of().sampler_kv, slots=1).limits.shape
    assert from_config(model.config.to_dict(), "qwen3.5").state_bytes(2) == shape.state_bytes


@pytest.mark.parametrize("policy", ["rkv", "full"])
def test_automatic_slots_follow_the_states(hybrid, policy):
    config = run_of(policy, slots="auto", prompts_per_step=64, samples_per_prompt=8, max_tokens=2048)
    room = {"memory_bytes": 14 * GIB, "prompt_tokens": 100}
    plan = make_plan(config, hybrid, **room)
    assert plan.fits and 8 < plan.slots < 512
    assert not make_plan(config, hybrid, **room, slots=plan.slots + 1).fits
    smaller = replace(hybrid, states=hybrid.states[:3])
    assert make_plan(config, smaller, **room).slots > plan.slots


def test_a_decode_step_reads_and_writes_states(hybrid):
    gpu, none = GPUS["h200"], hybrid.full
    assert none.layers == 2 and token_bytes(none, 2) == 2 * 2 * 256 * 2 and not none.states
    more_s = decode_s(hybrid, 64, 1000, 2, gpu, layer_s=0.0) - decode_s(none, 64, 1000, 2, gpu, layer_s=0.0)
    assert more_s == pytest.approx(64 * 2 * hybrid.state_bytes(2) / (gpu.bandwidth * BANDWIDTH_SHARE))


# Runs


def test_a_run_of_a_hybrid_model_is_planned(monkeypatch):
    """Slots, checkpointing and the advice of a run then follow the plan."""
    monkeypatch.setattr(memory, "room_bytes", lambda device: 160 * 2**20)
    model, config = family("qwen3.5"), run_of(slots="auto", prompts_per_step=64, samples_per_prompt=8)
    model.__class__ = type("OnGpu", (type(model),), {"device": torch.device("cuda:0")})
    plan = plan_run(config, model, len(LONG))
    assert plan is not None and plan.fits and 8 < plan.slots < 512
    assert slots_of(config, plan, torch.device("cuda:0")) == plan.slots
    assert checkpointed_layers(config, plan, model) == plan.checkpointed_layers < 4
    fixed = make_plan(config, plan.dims, memory_bytes=plan.memory_bytes // 2, prompt_tokens=len(LONG), slots=plan.slots)
    assert "the plan fits with --" in str(out_of_memory(config, fixed))


def test_suggestions_are_those_that_a_family_supports(hybrid, experts):
    config = Config(model={"dtype": "bfloat16"}, kv={"policy": "rkv"}, rollout={"slots": 64})
    found = {dims: sentence(make_plan(config, dims, memory_bytes=6 * GIB, slots=64)) for dims in (hybrid, experts)}
    assert all("the plan fits with --" in each for each in found.values()), found
    assert "--kv.dtype 8bit" in found[experts] and "4bit" not in found[experts]


def test_experts_per_token_may_be_stated_for_each_layer():
    """The config.json of Hunyuan-A13B lists them."""
    config = HunYuanMoEV1Config(**SIZE, **HEADS, intermediate_size=512, num_experts=8, moe_topk=[2, 4] * 4)
    assert (found := from_config(config.to_dict(), "listed")).active_experts == 4 and found.experts == 8


def test_tokens_read_the_experts_that_they_choose(experts):
    idle = experts.weights.routed * 28 // 32
    assert experts.weights.routed == 8 * 32 * 3 * 1024 * 512 > experts.params / 2
    assert experts.active_params == experts.params - experts.embedding_params - idle
    assert experts.read_params(10**6) == pytest.approx(experts.active_params + idle)


# Activations


@pytest.mark.parametrize(("name", "rank"), [("OLMo 2", 0), ("GPT-2", 4), ("Qwen3-MoE", 0), ("Qwen3-MoE", 4)])
def test_activations_are_at_least_what_autograd_keeps(name, rank):
    layers = [kept_bytes(RUNS[name], count, rank) for count in (2, 3)]
    config = Config(model={"dtype": "bfloat16", "lora": {"rank": rank}})
    planned = parts.kept_per_token(config, from_config(RUNS[name].to_dict(), name))
    assert 1 <= planned / ((layers[1] - layers[0]) / 64) < 1.8


# The command


def test_the_plan_of_a_hybrid_model_shows_its_states(tmp_path, capsys):
    """The config.json of a Qwen3.5 also describes images, which a causal language model does not have."""
    config = Qwen3_5Config(text_config=HYBRID.to_dict())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    main(["plan", str(tmp_path), "--method", "dense", "--gpu-memory", "80GiB", "--json", str(tmp_path / "plan.json")])
    shown = capsys.readouterr().out
    assert ESTIMATED in shown and "recurrent states" in shown and "KV and states of a slot" in shown
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["params"] == from_config(HYBRID.to_dict(), "text").params
    assert written["phases"]["update"]["recurrent states"] > 0


def test_a_model_that_cannot_be_built_is_refused_with_the_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(RUNS["Qwen3.5"].to_dict() | {"layer_types": ["linear_attention"]}))
    assert "cannot be planned: transformers cannot build" in refused(capsys, "plan", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "cannot be planned: transformers cannot build a causal language model" in refused(capsys, "plan", str(tmp_path))
