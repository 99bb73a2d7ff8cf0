"""Small real transformers models with random weights, and the embedded one."""

import fcntl
import gc
import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before sparse_rl is imported

from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from interpreter import make_faster
from small_runs import make_world
from sparse_rl import KV, Engine, Sampling, load_model, replay

if os.environ.get("TRITON_INTERPRET"):
    make_faster()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started with Ctrl-C ignored

ARCHITECTURES = {
    "llama": LlamaConfig(num_key_value_heads=4),  # multi-head
    "qwen2": Qwen2Config(num_key_value_heads=2),  # grouped, with biases
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=24),  # normalised queries and keys, a head dimension of its own
    "mistral": MistralConfig(num_key_value_heads=1, sliding_window=None),  # multi-query
}


def random_model(name, *, vocab=61, seed=0):
    config = ARCHITECTURES[name]
    config.update(
        {
            "vocab_size": vocab,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 8192,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "pad_token_id": 0,
        }
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # fresh weights attend almost evenly, which would hide what eviction does
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def noise_early_and_late(model, *, samples, tokens):
    """Mean distance of sampler and replay in tokens 100 to 200 and in the last third of the rollouts.

    The log-probs of a random model are alike at every length, so the two differ only where noise gathers. Over the first
    hundred tokens the noise rises by up to a third, as the kept positions spread; from there it must stay level."""
    engine = Engine(model, KV(policy="rkv", budget=32, interval=8, window=4, sinks=2, protect_prompt=False), slots=samples)
    rollouts = engine.generate([[7, 8, 9]], samples, Sampling(max_tokens=tokens, stop=()))
    with torch.no_grad():
        replayed = replay(model, rollouts, "sparse")
    noise = torch.stack([(ours.cpu() - rollout.logprobs).abs() for ours, rollout in zip(replayed, rollouts, strict=True)])
    return float(noise[:, 100:200].mean()), float(noise[:, -tokens // 3 :].mean())


LONGEST = [
    "ray",
    "distributed",
    "hybrid",
    "train",
    "docs",
    "families",
    "model_table",
    "kernels",
    "plan",
    "windows",
    "routing_replay",
    "auto_budget",
    "plan_windows",
    "code_attention",
    "models",
    "longest",
    "trl",
    "trl_ranks",
    "four_bit",
    "wheel",
    "resume",
    "quantised_cache",
    "report",
]
"""Files that are begun first, the longest before the others: two processes that share the files then end at about the same
time."""


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """Exempt the objects of all imports from garbage collection: walking a million of them again and again takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def models():
    return {name: random_model(name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def model(models):
    return models["qwen2"]


@pytest.fixture(scope="session")
def tiny():
    return load_model("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """What training runs need, see `small_runs.py`."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def looked_at(tmp_path_factory):
    """A small real comparison of a dense and a tight sparse run, to be looked at and not changed. All workers share it."""
    from report_runs import real_runs

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, complete = shared / "looked-at" / "both", shared / "looked-at.complete"
    with (shared / "looked-at.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            real_runs(folder)
            complete.touch()
    return folder
