"""LoRA on base weights in 4 bits: sampler and learner read the same codes, which no step changes."""

import copy
import sys

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from transformers import AutoModelForCausalLM, GptOssConfig, Lfm2Config, Qwen3MoeConfig

from small_runs import refused, train
from sparse_rl import KV, Engine, Sampling, UserError
from sparse_rl.config import Config, LoraConfig
from sparse_rl.learner.replay import replay
from sparse_rl.models.actor import Actor
from sparse_rl.models.four_bit import is_four_bit, quantize_layers, weight_count
from sparse_rl.models.load import load_model
from sparse_rl.models.reduced import reduced
from sparse_rl.models.shapes import SHAPES, random_model
from sparse_rl.plan import dimensions, make_plan
from sparse_rl.plan.dimensions import from_config
from sparse_rl.plan.parts import resident
from sparse_rl.plan.remedies import _edits
from test_resume import assert_same_run, state_of

FLAGS = ["--model.lora.rank", "2", "--model.lora.base", "4bit", "--checkpoint.every", "1"]
PROMPTS = [[0, 25, 29, 23, 25, 14, 27, 24, 32] * 3, [0, 11, 12, 13, 14]]


@pytest.fixture
def actor():
    torch.manual_seed(0)
    made = Actor(load_model("tiny", dtype="float32", device="cpu", base="4bit"), LoraConfig(rank=4, base="4bit"))
    with torch.no_grad():
        for name, weight in made.learner.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    return made


def codes(model):
    return {name: weight.clone() for name, weight in model.named_parameters() if weight.dtype == torch.uint8}


@pytest.mark.parametrize("policy", ["rkv", "full"])
def test_replay_gives_the_log_probs_of_the_sampler(actor, policy):
    kv = KV(policy="full") if policy == "full" else KV(policy=policy, budget=32, interval=8, protect_prompt=False)
    rollouts = Engine(actor.sampler, kv, slots=3).generate(PROMPTS, 2, Sampling(max_tokens=80, seed=1, stop=()))
    assert policy == "full" or all(len(rollout.evicted_at.unique()) > 5 for rollout in rollouts)
    with torch.no_grad():
        replayed = replay(actor.learner, rollouts, "sparse")
    for mine, theirs in zip(rollouts, replayed, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs, atol=1e-4, rtol=0)


def test_adapters_change_what_is_sampled_and_the_reference_ignores_them(actor):
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        adapted = actor.sampler(tokens).logits
        with actor.reference() as model:
            base = model(tokens).logits
        untouched = load_model("tiny", dtype="float32", device="cpu", base="4bit")(tokens).logits
    assert torch.equal(base, untouched) and not torch.allclose(base, adapted, atol=1e-2)


def test_the_gradient_is_that_of_the_expanded_weights(actor):
    """Of adapters on a plain model whose weights are what the codes stand for."""
    from bitsandbytes.functional import dequantize_4bit

    plain = load_model("tiny", dtype="float32", device="cpu")
    for name, layer in actor._adapted():
        weight = layer.get_base_layer().weight
        plain.get_submodule(name).weight.data = dequantize_4bit(weight.data, weight.quant_state)
    other = Actor(plain, LoraConfig(rank=4, merge=False))
    missing = other.learner.load_state_dict(
        {name: weight for name, weight in actor.learner.state_dict().items() if "lora_" in name}, strict=False
    )
    assert not missing.unexpected_keys
    gradients = []
    for each in (actor, other):
        logits = each.learner.train()(torch.tensor(PROMPTS[:1])).logits
        logits.log_softmax(-1)[..., 5].sum().backward()
        gradients.append({name: weight.grad for name, weight in each.learner.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 4 * 7
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-4, rtol=1e-4)


def test_a_run_trains_adapters_alone_and_resumes_to_the_bit(world, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(world, whole, *FLAGS, "--steps", "3")
    train(world, parts, *FLAGS, "--steps", "1")
    train(world, parts, *FLAGS, "--steps", "3", "--resume")
    assert_same_run(whole, parts, 3)
    first, last = (state_of(whole, step)[0] for step in (2, 3))
    assert str(first) != str(last)
    base = AutoModelForCausalLM.from_pretrained(world / "model")
    logits = base(torch.tensor(PROMPTS[:1])).logits
    adapted = PeftModel.from_pretrained(base, whole / "model")(torch.tensor(PROMPTS[:1])).logits
    assert not torch.allclose(logits, adapted, atol=1e-3)


def test_the_adapter_of_a_run_is_loaded_on_codes(world, tmp_path):
    """As it was trained; `eval` loads it like this."""
    train(world, tmp_path / "run", *FLAGS, "--steps", "1", "--optimizer.lr", "0.01")
    loaded = load_model(str(tmp_path / "run" / "model"), device="cpu")
    base = load_model(str(world / "model"), device="cpu", base="4bit")
    assert is_four_bit(loaded) and codes(loaded).keys() == {
        name.replace("weight", "base_layer.weight") for name in codes(base)
    }
    tokens = torch.tensor(PROMPTS[:1])
    before = base(tokens).logits
    expected = PeftModel.from_pretrained(base, tmp_path / "run" / "model")(tokens).logits
    torch.testing.assert_close(loaded(tokens).logits, expected, atol=1e-5, rtol=0)
    assert (before - expected).abs().max() > 1e-3


def test_a_step_leaves_the_codes_alone(actor):
    before = codes(actor.learner)
    assert len(before) == 4 * 7
    actor.sync()
    actor.merge()
    actor.restore()
    assert all(torch.equal(weight, before[name]) for name, weight in codes(actor.learner).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_the_bytes_of_codes_and_scales(monkeypatch, dtype):
    monkeypatch.setitem(
        SHAPES, "0.5B", SHAPES["0.5B"] | {"num_hidden_layers": 1, "vocab_size": 512, "intermediate_size": 1024}
    )
    model = random_model("0.5B", dtype=getattr(torch, dtype), device="cpu", seed=0, base="4bit")
    config = Config(model={"path": "0.5B", "dtype": dtype, "lora": {"rank": 4, "base": "4bit"}})
    found = sum(weight.untyped_storage().nbytes() for weight in model.parameters())
    for weight in model.parameters():
        if weight.dtype == torch.uint8:
            found += weight.quant_state.absmax.nbytes + weight.quant_state.state2.absmax.nbytes
    parts = resident(config, dimensions("0.5B"))
    assert parts["weights"] == pytest.approx(found, rel=1e-4) and parts["merged copy"] == 0
    whole = resident(Config(model={"path": "0.5B", "dtype": dtype, "lora": {"rank": 4}}), dimensions("0.5B"))
    assert parts["weights"] < (0.25 if dtype == "float32" else 0.4) * whole["weights"]


def test_the_self_check_rounds_no_products():
    """Rounded inputs would hide a fault of the model, and the kernels of bitsandbytes round differently for different row counts."""
    layer = reduced(load_model("tiny", dtype="bfloat16", device="cpu", base="4bit")).model.layers[0].mlp.up_proj
    rows = torch.randn(3, layer.in_features)
    state = copy.copy(layer.quant_state)
    state.dtype = torch.float32
    weight = dequantize_4bit(layer.weight, state)
    torch.testing.assert_close(layer(rows), rows @ weight.T, atol=1e-5, rtol=1e-5)


def test_the_plan_of_a_run_counts_weights_and_not_bytes(actor):
    assert weight_count(load_model("tiny", base="4bit", device="cpu")) == dimensions("tiny").params


def test_adapters_of_a_hybrid_model():
    """Its convolutions are three-dimensional weights, as stacked experts are."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        Lfm2Config(**sizes, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    )
    quantize_layers(model)
    learner = Actor(model.to("cpu"), LoraConfig(rank=2, base="4bit")).learner
    assert sum(hasattr(module, "get_delta_weight") for module in learner.modules()) == 2 + 3 + 4 + 3


def test_bad_input(world, tmp_path, capsys):
    flags = ["train", "--model.path", str(world / "model"), "--run-dir", str(tmp_path / "run")]
    assert "trains adapters only: set model.lora.rank" in refused(capsys, *flags, "--model.lora.base", "4bit")
    experts = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_experts=8, num_hidden_layers=2, vocab_size=64,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        )
    )  # fmt: skip
    with pytest.raises(UserError, match="cannot store qwen3_moe: only .*% of its layers' weights are in linear layers"):
        quantize_layers(experts)
    gpt_oss = from_config(GptOssConfig().to_dict(), "gpt-oss")
    config = Config(model={"path": "tiny", "lora": {"rank": 4, "base": "4bit"}})
    with pytest.raises(UserError, match="cannot store gpt-oss: less than half of its layers' weights are in linear layers"):
        make_plan(config, gpt_oss)
    assert not any("4bit" in flags for kind in _edits(Config(), 256, takes_4bit=False, takes_codes=True) for flags, _ in kind)


def test_without_bitsandbytes_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(UserError, match=r"model.lora.base = 4bit needs bitsandbytes: pip install 'sparse-rl\[4bit\]'."):
        load_model("tiny", base="4bit")
