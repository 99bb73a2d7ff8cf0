"""FSDP2 forced upon one rank, on each kind of device: whole runs that shard, gather, reduce, sync and save, and learn what runs
without it learn. On CUDA with NCCL: `pytest -m gpu tests/test_sharded.py`."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from small_runs import arguments, metrics, one_thread, without_clock
from sparse_rl import KV, Engine, Sampling, load_model
from sparse_rl.cli import main
from sparse_rl.config import LoraConfig, RanksConfig
from sparse_rl.learner.replay import forward, response_logprobs
from sparse_rl.models.actor import Actor
from sparse_rl.models.sharded import sum_over_ranks, with_weights
from sparse_rl.train import trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from families import RUNS, build

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
LR = 3e-4
FLAGS = [
    *(
        "--model.path",
        "tiny",
        "--rollout.temperature",
        "1.5",
        "--rollout.samples-per-prompt",
        "4",
        "--rollout.max-tokens",
        "40",
    ),
    *("--kv.policy", "rkv", "--kv.protect-prompt", "false"),
    *("--kv.budget", "20", "--kv.interval", "4", "--checkpoint.every", "1", "--optimizer.lr", str(LR)),
]
KINDS = {
    "two passes, a reference": ["--loss.kl-coef", "0.01", "--optimizer.tokens-per-microbatch", "256"],
    "smd, little memory": [
        *("--method", "smd", "--ranks.hold-gradients", "false", "--optimizer.gradient-checkpointing"),
        *("--optimizer.tokens-per-microbatch", "256"),
    ],
}


@pytest.fixture
def group(device) -> Iterator[None]:
    """One rank that talks to itself, on a GPU through NCCL."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    dist.destroy_process_group()


@pytest.fixture
def actors(monkeypatch) -> list[Actor]:
    """Those of the runs that follow: they shard, as those of many ranks do."""
    made: list[Actor] = []

    def sharded(model, lora, *, keep_reference, ranks) -> Actor:
        made.append(Actor(model, lora, keep_reference=keep_reference, ranks=ranks.model_copy(update={"count": 2})))
        return made[-1]

    monkeypatch.setattr(trainer, "Actor", sharded)
    return made


@pytest.fixture
def train(world, device):
    def run(folder: Path, dtype: str, *flags: str) -> None:
        with one_thread():
            main([*arguments(world, folder, *FLAGS), "--model.device", device, "--model.dtype", dtype, *flags])

    return run


def start(model: str | Path, dtype: str) -> dict[str, torch.Tensor]:
    """The weights that runs start from."""
    return {name: weight.detach() for name, weight in load_model(str(model), dtype=dtype, device="cpu").named_parameters()}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


def farthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)


def assert_same_metrics(left: Path, right: Path, steps: int, rel: float) -> None:
    pairs = zip(without_clock(metrics(left))[1 : steps + 1], without_clock(metrics(right))[1 : steps + 1], strict=True)
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys() and ours["policy/grad_norm"] > 0
        for key in (key for key in ours if not key.startswith("memory/")):
            assert ours[key] == pytest.approx(theirs[key], rel=rel, abs=1e-5), key


def assert_sampler_has_what_was_learned(actor: Actor) -> None:
    learned, sampled = dict(actor.learner.named_parameters()), dict(actor.sampler.named_parameters())
    assert learned.keys() == sampled.keys() and actor.learner is not actor.sampler
    for name, weight in learned.items():
        assert isinstance(weight, DTensor) and weight.dtype == torch.float32
        assert torch.equal(weight.full_tensor().to(sampled[name].dtype), sampled[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_run_that_is_resumed_learns_what_a_whole_one_learns(
    kind, device, group, actors, train, tmp_path, monkeypatch
):
    whole, spread = tmp_path / "whole", tmp_path / "spread"
    train(spread, "float32", *KINDS[kind], "--steps", "1")
    train(spread, "float32", *KINDS[kind], "--steps", "2", "--resume")
    assert len(actors) == 2
    assert_sampler_has_what_was_learned(actors[-1])
    monkeypatch.setattr(trainer, "Actor", Actor)
    train(whole, "float32", *KINDS[kind], "--steps", "2")
    assert farthest(weights(whole), start("tiny", "float32")) > LR / 2
    if device == "cpu":
        assert farthest(weights(whole), weights(spread)) < 1e-5
    else:  # where sums of few terms have any order, and AdamW makes a step of what is zero but for rounding
        assert farthest(weights(whole), weights(spread)) <= 4 * LR
        apart = [(weights(whole)[name] - weight).abs().flatten() for name, weight in weights(spread).items()]
        assert float((torch.cat(apart) > 1e-5).float().mean()) < 1e-3
    assert_same_metrics(whole, spread, steps=2, rel=1e-3)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    "family",
    ["gpt-oss", "Gemma 2", "Gemma 3n", "Gemma 4 with shared keys", "Qwen3.5", "Qwen3-Next", "Falcon-H1", "Nemotron-H", "LFM2"],
)
def test_shards_of_every_kind_of_layer_have_the_gradients_of_the_whole(family, device, group):
    """Sinks, experts, soft caps, windows, recurrent layers, and layers that do not mix tokens."""
    model = build(RUNS[family])
    whole = copy.deepcopy(model)
    kv = KV(policy="rkv", budget=16, interval=4, window=4, sinks=2, protect_prompt=False)
    rollouts = Engine(model, kv, slots=2).generate([[7, 8, 9], list(range(3, 31))], 1, Sampling(max_tokens=24, stop=()))

    def logprobs(learner) -> torch.Tensor:
        return torch.cat(response_logprobs(learner, forward(learner, rollouts, "sparse")))

    actor = Actor(model, LoraConfig(), ranks=RanksConfig(count=2))
    assert sum_over_ranks(actor.learner, now=True) == 1
    ours, theirs = with_weights(actor.learner, logprobs), logprobs(whole)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    (ours.sum() + theirs.sum()).backward()
    for (name, spread), weight in zip(actor.learner.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(spread, DTensor) and (spread.grad is None) == (weight.grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(spread.grad.full_tensor(), weight.grad, atol=1e-6, rtol=1e-4, msg=name)
    actor.sync()
    assert_sampler_has_what_was_learned(actor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
def test_half_precision_is_gathered_in_its_dtype_and_learned_in_float32(
    world, device, group, actors, train, tmp_path, monkeypatch
):
    whole, spread = tmp_path / "whole", tmp_path / "spread"
    few = ["--steps", "1", "--model.path", str(world / "model")]  # a CPU without bfloat16 is slow
    train(spread, "bfloat16", *few)
    assert_sampler_has_what_was_learned(actors[-1])
    assert {weight.dtype for weight in actors[-1].sampler.parameters()} == {torch.bfloat16}
    monkeypatch.setattr(trainer, "Actor", Actor)
    train(whole, "bfloat16", *few)
    assert farthest(weights(spread), start(world / "model", "bfloat16")) > 0
    assert farthest(weights(whole), weights(spread)) <= 2.1 * LR  # AdamW's first step has this size, either way
    assert_same_metrics(whole, spread, steps=1, rel=2e-2)
