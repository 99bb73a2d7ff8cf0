"""Compiled parts of a model: one compilation for all layers and lengths, the same numbers, and nothing left behind."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from random_models import ARCHITECTURES, random_model
from sparse_rl.config import OptimizerConfig
from sparse_rl.learner.logprobs import chunk_gradient, chunk_statistics
from sparse_rl.learner.optimizer import Optimizer, checkpointed
from sparse_rl.learner.replay import logprobs_of
from sparse_rl.models import compile as compiler
from sparse_rl.models.compile import decoder_layers, decoding, fuse_projections, fused, fused_layers
from sparse_rl.rollout.rollout import Rollout

TOKENS = torch.tensor([[5, 6, 7, 8]])


# The learner


@pytest.fixture
def compilations(monkeypatch):
    """Pieces traced on a CPU as they are on a GPU, for a backend that only counts."""
    torch._dynamo.reset()
    seen = []

    def count(graph, example):
        # a float that became an input would be read on the host in every call
        assert not any(isinstance(each, torch.Tensor) and each.dim() == 0 for each in example)
        seen.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(compiler, "fuses", lambda device: not compiler._broken)
    monkeypatch.setattr(compiler, "_broken", [])
    monkeypatch.setattr(compiler, "WORTH_COMPILING", 0)
    cached = compiler._compiled
    cached.cache_clear()

    def counted(function, dynamic, **how):
        compile(function, dynamic=dynamic, **how)  # refuses options that the compiler does not have
        return compile(function, backend=count, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", counted)
    yield seen
    cached.cache_clear()


def logprobs_and_gradients(model, rollouts, checkpointing):
    model.zero_grad()
    with checkpointed(model, 2 * checkpointing):
        logprobs, _ = logprobs_of(model, rollouts, "dense")
        logprobs.sum().backward()
    return [logprobs.detach(), *(weight.grad.clone() for weight in model.parameters())]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def rollouts_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]
    return [Rollout([5, 6], each, torch.zeros(len(each)), "length", 0, 1.0, 0, None) for each in responses]


@pytest.mark.parametrize(("name", "checkpointing"), [("qwen2", False), ("qwen3", False), ("gpt2", False), ("qwen3", True)])
def test_a_model_with_compiled_layers_is_the_same_model(compilations, name, checkpointing):
    """Qwen2 has biases, and Qwen3 all else that Llama and Mistral have."""
    model = gpt2() if name == "gpt2" else random_model(name)
    for lengths in ((7, 5), (33,), (12, 3, 8)):
        rollouts = rollouts_of(*lengths)
        plain = logprobs_and_gradients(model, rollouts, checkpointing)
        with fused_layers(model):
            compiled = logprobs_and_gradients(model, rollouts, checkpointing)
        for left, right in zip(plain, compiled, strict=True):
            torch.testing.assert_close(left, right)
    assert not compiler._broken
    assert len(compilations) <= 5  # four parts of a layer, around attention, and the final norm
    assert not model.get_input_embeddings()._forward_hooks
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_compiler_that_fails_is_done_without_and_said_once(compilations, monkeypatch):
    def fails(*args):
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand a long trace")

    monkeypatch.setattr(compiler, "_compiled", lambda function: fails)
    with pytest.warns(UserWarning, match="no compiler") as warned:
        sums = [fused(torch.add, torch.ones(3), torch.ones(3)) for _ in range(2)]
    assert all(torch.equal(each, torch.full((3,), 2.0)) for each in sums)
    assert len(warned) == 1 and "trace" not in str(warned[0].message)


def test_small_models_and_cpus_are_left_alone():
    model = random_model("qwen2")
    with fused_layers(model):
        assert not any("forward" in module.__dict__ for module in model.modules())


def test_chunks_of_any_size_are_compiled_once(compilations):
    generator = torch.Generator().manual_seed(0)
    for rows in (8, 5, 3):
        logits = torch.randn(rows, 50, generator=generator)
        targets, factors = torch.randint(50, (rows,), generator=generator), torch.full((rows,), 0.8)
        logprobs, entropy, log_Z = fused(chunk_statistics, logits, targets, factors)
        expected = (logits * 0.8).log_softmax(-1)
        torch.testing.assert_close(logprobs, expected.gather(-1, targets[:, None])[:, 0])
        ones = torch.ones(rows)
        gradient = fused(chunk_gradient, logits, targets, factors, entropy, log_Z, ones, ones)
        leaf = logits.clone().requires_grad_()
        (sum(part.sum() for part in chunk_statistics(leaf, targets, factors)[:2])).backward()
        torch.testing.assert_close(gradient, leaf.grad)
    assert not compiler._broken and len(compilations) == 2


# The sampler


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return random_model(request.param)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_projections_share_a_storage_and_stay_parameters(model):
    before, names = logits(model), {name: id(param) for name, param in model.named_parameters()}
    fuse_projections(model)
    attention = decoder_layers(model)[0].self_attn
    q, k, v = (getattr(attention, f"{name}_proj").weight for name in "qkv")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert {name: id(param) for name, param in model.named_parameters()} == names
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    pointer = k.data_ptr()
    fuse_projections(model)
    assert k.data_ptr() == pointer


def test_a_fused_model_is_saved_copied_and_trained_like_any_other(model, tmp_path):
    twin = copy.deepcopy(model)
    fuse_projections(model)
    before = logits(model)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[
            : model.config.num_hidden_layers
        ]  # the tests' models are cut short
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(saved[name], weight.detach(), rtol=0, atol=0)
    copied = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = Optimizer(each, OptimizerConfig(lr=1e-2), steps=2)
        each(TOKENS, labels=TOKENS).loss.backward()
        optimizer.update(0)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)
    torch.testing.assert_close(logits(copied), before, rtol=0, atol=0)  # the copy has a storage of its own


def test_inside_decoding_layers_are_compiled_and_outside_they_are_as_before(compilations):
    """`test_gpu.py` runs what the compiler makes of them."""
    model = random_model("qwen2")
    fuse_projections(model)
    before = logits(model)
    layer = decoder_layers(model)[0]
    linear = layer.self_attn.q_proj
    with decoding(model, compile=True):
        assert type(layer.self_attn.q_proj) is not nn.Linear and "forward" in layer.__dict__
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            layer.mlp.down_proj.weight.mul_(2)
        changed = logits(model)
    assert compilations
    assert layer.self_attn.q_proj is linear and "forward" not in layer.__dict__
    torch.testing.assert_close(logits(model), changed, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, before)


def test_a_failure_inside_leaves_nothing_behind():
    model = random_model("llama")
    fuse_projections(model)
    layer = decoder_layers(model)[0]
    with pytest.raises(RuntimeError), decoding(model, compile=True):
        raise RuntimeError
    assert type(layer.self_attn.q_proj) is nn.Linear and "forward" not in layer.__dict__
