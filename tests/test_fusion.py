"""Compiled pieces: one compilation for all layers and lengths, the same numbers, and nothing left behind."""

import pytest
import torch

from conftest import random_model
from sparse_rl.learner import fusion
from sparse_rl.learner.fusion import fused, fused_layers
from sparse_rl.learner.logprobs import chunk_gradient, chunk_statistics
from sparse_rl.learner.optimizer import checkpointed


@pytest.fixture
def compilations(monkeypatch):
    """Pieces traced on a CPU as they are on a GPU, for a backend that only counts."""
    torch._dynamo.reset()
    seen = []

    def count(graph, example):
        seen.append(graph)
        return graph.forward

    made = {}
    monkeypatch.setattr(fusion, "fuses", lambda device: not fusion._broken)
    monkeypatch.setattr(fusion, "_broken", [])
    monkeypatch.setattr(fusion, "WORTH_COMPILING", 0)
    monkeypatch.setattr(
        fusion, "_compiled", lambda function: made.setdefault(function, torch.compile(function, backend=count))
    )
    return seen


def logprobs_and_gradients(model, tokens, checkpointing):
    model.zero_grad()
    with checkpointed(model, checkpointing):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_with_compiled_pieces_is_the_same_model(compilations, checkpointing):
    model = random_model("qwen2")
    for length in (7, 12, 33):
        tokens = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(length))
        plain = logprobs_and_gradients(model, tokens, checkpointing)
        with fused_layers(model):
            compiled = logprobs_and_gradients(model, tokens, checkpointing)
        for left, right in zip(plain, compiled, strict=True):
            torch.testing.assert_close(left, right)
    assert not fusion._broken
    assert len(compilations) == 2  # a norm and an MLP, whatever the layer and the length
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_compiler_that_fails_is_done_without_and_said_once(compilations, monkeypatch):
    def fails(*args):
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand a long trace")

    monkeypatch.setattr(fusion, "_compiled", lambda function: fails)
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
    assert not fusion._broken and len(compilations) == 2
