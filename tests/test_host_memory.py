"""The plan's host memory: each part is the size of the objects that a run holds."""

import gc
import inspect
import json
import pickle
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, Qwen2Config

from sparse_rl import KV, Engine, Sampling, host_memory
from sparse_rl.cli import main
from sparse_rl.config import Config, LoraConfig, OptimizerConfig
from sparse_rl.learner.batch import padded
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.models.actor import Actor
from sparse_rl.plan import make_plan
from sparse_rl.plan.dimensions import from_config
from sparse_rl.plan.host import host_phases, host_plan, rollout_bytes, trace_bytes
from sparse_rl.rewards.batch import Graded
from sparse_rl.rollout.exchange import to_arrays
from sparse_rl.rollout.graded import GradedRollouts
from sparse_rl.rollout.stats import Stats
from sparse_rl.sizes import recorded_rollouts
from sparse_rl.train.checkpoint import bytes_of
from sparse_rl.train.manifest import HashingFileSystem

SHAPE = Qwen2Config(
    vocab_size=8000,  # Python shares integers below 257, and hardly any token is one
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    eos_token_id=None,
)
DIMS = from_config(SHAPE.to_dict(), "small")
SMALL = {"policy": "rkv", "budget": 24, "interval": 6, "window": 4, "sinks": 2, "protect_prompt": False}
PROMPT, TOKENS = 5, 90


def run_config(**sections) -> Config:
    sections["rollout"] = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_tokens": TOKENS} | sections.pop("rollout", {})
    return Config(**({"kv": SMALL, "model": {"dtype": "bfloat16"}} | sections))


def parts_of(phase: str, config: Config) -> dict[str, int]:
    return next(each.parts for each in host_phases(config, DIMS, PROMPT) if each.name == phase)


def small_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPE, dtype=dtype).eval()


@pytest.fixture(scope="module")
def rollouts():
    prompts = [[300 + number] * PROMPT for number in range(3)]
    engine = Engine(small_model(torch.float32), KV(**SMALL), slots=12)
    return engine.generate(prompts, 4, Sampling(max_tokens=TOKENS, stop=()))


def test_rollouts_are_counted_with_their_python_integers(rollouts):
    lists = {id(each): each for rollout in rollouts for each in (rollout.prompt, rollout.response)}
    integers = {id(token): token for rollout in rollouts for token in rollout.response if token > 256}
    held = sum(map(sys.getsizeof, (*lists.values(), *integers.values())))
    held += sum(rollout.logprobs.untyped_storage().nbytes() for rollout in rollouts)
    assert held <= rollout_bytes(run_config(), PROMPT) <= 1.2 * held  # Python rounds an integer of 28 bytes up to 32


def test_traces_are_counted_before_and_after_they_are_read(rollouts):
    events = [event for rollout in rollouts for event in inspect.getclosurevars(rollout.trace._codes).nonlocals["events"]]
    dropped = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for _, each, _ in events}
    codes = sum(rollout.trace.codes_LHT.nbytes for rollout in rollouts)
    counted = trace_bytes(run_config(method="smd"), DIMS, PROMPT)
    assert sum(dropped.values()) <= counted[0] <= 1.2 * sum(dropped.values()) and counted[1] == codes
    assert parts_of("update", run_config(method="smd"))["traces"] == sum(counted)
    assert trace_bytes(run_config(method="dense"), DIMS, PROMPT) == (0, 0)
    many = {"prompts_per_step": 100}
    few, every = (trace_bytes(run_config(method=name, rollout=many), DIMS, PROMPT) for name in ("sparse_rl", "smd"))
    recorded = len(recorded_rollouts(run_config(rollout=many), 400))
    assert recorded == 8 and [each * 400 for each in few] == [each * recorded for each in every]


def test_log_probs_are_padded_on_the_host_before_they_are_copied(rollouts):
    assert parts_of("update", run_config())["padded log-probs"] == padded([each.logprobs for each in rollouts]).nbytes


def test_ranks_exchange_what_is_counted(rollouts):
    graded = Graded([0.0] * 12, 0, 0, 0, None)
    sent = len(pickle.dumps(to_arrays(GradedRollouts(list(range(12)), rollouts, [], graded, Stats(), 0.0))))
    assert parts_of("sampling", run_config(ranks={"count": 2}))["exchange"] == pytest.approx(2 * sent, rel=0.2)
    assert parts_of("sampling", run_config())["exchange"] == 0


@pytest.mark.parametrize("rank", [0, 4])
def test_an_offloaded_optimizer_holds_masters_moments_and_gradients(rank):
    actor = Actor(small_model(), LoraConfig(rank=rank, merge=False))
    # adapters are float32: they are copied to the host only from a GPU
    learner = actor.learner.to(torch.bfloat16) if rank else actor.learner
    optimizer = Optimizer(learner, OptimizerConfig(state="offload"), steps=1)
    learner(torch.tensor([[1, 2, 3]])).logits.float().square().mean().backward()
    gradients = sum(collector.grad.nbytes for collector in optimizer.collectors)
    masters = sum(master.nbytes for master in optimizer.masters)
    moments = sum(state[name].nbytes for state in optimizer.moments.values() for name in ("exp_avg", "exp_avg_sq"))
    counted = parts_of("update", run_config(**{"optimizer": {"state": "offload"}, **adapted(rank)}))
    assert counted["optimizer state"] == masters + moments and counted["gradients"] == gradients
    assert parts_of("update", run_config())["optimizer state"] == parts_of("update", run_config())["gradients"] == 0


def adapted(rank: int, merge: bool = False) -> dict:
    return {"model": {"dtype": "bfloat16", "lora": {"rank": rank, "merge": merge}}}


def test_base_weights_are_on_the_host_if_adapters_are_merged_in_place():
    held = sum(weight.nbytes for weight in Actor(small_model(), LoraConfig(rank=4, merge=False)).base.values())
    assert all(phase.parts["base weights"] == held for phase in host_phases(run_config(**adapted(4)), DIMS, PROMPT)[1:])
    assert parts_of("sampling", run_config(**adapted(4, merge=True)))["base weights"] == 0


def test_a_model_is_loaded_and_written_through_the_host():
    model = small_model()
    weights = sum(weight.nbytes for weight in model.parameters())
    assert parts_of("load", run_config()) == {"model weights": weights}
    assert parts_of("final model", run_config())["model weights"] == weights
    trained = [weight for weight in Actor(model, LoraConfig(rank=4)).learner.parameters() if weight.requires_grad]
    assert parts_of("final model", run_config(**adapted(4)))["model weights"] == sum(weight.nbytes for weight in trained)


def test_a_checkpoint_is_a_copy_of_what_is_on_the_gpu():
    optimizer = Optimizer(small_model(), OptimizerConfig(), steps=1)
    assert parts_of("checkpoint", run_config())["checkpoint copy"] == bytes_of(optimizer)
    half = {"optimizer": {"state": "offload"}}
    assert parts_of("checkpoint", run_config(**half))["checkpoint copy"] == 0
    sharded = parts_of("checkpoint", run_config(ranks={"count": 2}))["checkpoint copy"]
    assert sharded == bytes_of(optimizer) // 2


def test_torch_holds_every_copied_tensor_until_the_checkpoint_is_written(tmp_path):
    """A slice is copied on a CPU as a tensor of a GPU would be."""
    weights = {str(number): torch.ones(2, 5077)[0] for number in range(8)}
    alive = []

    class Counting(HashingFileSystem):
        @contextmanager
        def create_stream(self, path, mode):
            with super().create_stream(path, mode) as file:
                yield file
                copies = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 5077]
                alive.append(sum(each.untyped_storage().nbytes() == 4 * 5077 for each in copies))

    writer = dcp.FileSystemWriter(tmp_path / "checkpoint")
    writer.fs = Counting(writer.fs)
    dcp.save({"weights": weights}, storage_writer=writer, no_dist=True)
    assert max(alive) == len(weights)


# What is said


def test_the_plan_says_how_much_host_memory_a_run_needs(tmp_path, capsys):
    target = tmp_path / "plan.json"
    flags = ["--optimizer.state", "offload", "--json", str(target)]
    main(["plan", "7B", *flags, "--host-memory", "64GiB"])
    out = " ".join(capsys.readouterr().out.split())
    host = json.loads(target.read_text())["host"]
    parts = host["phases_of_a_rank"]["update"]
    assert host["peak_phase"] == "update" and host["memory_bytes"] == 64 * 2**30
    assert host["peak_bytes"] == parts["all"] == sum(parts.values()) - parts["all"]
    assert "Host memory: " in out and "GiB in update (optimizer state " in out and ", gradients " in out
    assert (
        "warning: The run needs " in out
        and "of host memory, more than the 64.0 GiB of the machine: set optimizer.state" in out
    )
    main(["plan", "7B", *flags, "--host-memory", "512GiB"])
    assert "warning" not in capsys.readouterr().out


def test_ranks_of_a_machine_add_up():
    one, many = (make_plan(run_config(ranks={"count": count}), DIMS, prompt_tokens=PROMPT) for count in (1, 16))
    assert host_plan(one).ranks == 1 and host_plan(many).ranks == 8
    peak = host_plan(many).peak_bytes
    assert peak == 8 * host_plan(many).fullest.total and " GiB for 8 ranks, " in host_plan(many).line
    assert host_plan(many, peak - 1).warning and not host_plan(many, peak).warning and not host_plan(one, peak - 1).warning


def test_memory_of_this_machine_is_known_and_at_most_that_of_its_container(tmp_path, monkeypatch):
    whole = host_memory.machine_bytes()
    assert whole and whole > 2**28
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr(host_memory, "CGROUP_LIMITS", (tmp_path / "missing", limit))
    assert host_memory.machine_bytes() == 2**20
    limit.write_text("max\n")
    assert host_memory.machine_bytes() >= whole
