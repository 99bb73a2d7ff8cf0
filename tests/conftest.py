"""What all tests share. The process that only distributes them imports neither torch nor transformers."""

import fcntl
import gc
import os
import signal
import sys

import pytest

from frames import in_one_chunk

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started with Ctrl-C ignored

LONGEST = [
    "ray",
    "distributed",
    "train",
    "paged",
    "docs",
    "families",
    "report_browser",
    "model_table",
    "compiled_kernels",
    "auto_budget",
    "code_attention",
    "math_grading",
    "resume",
    "engine_kernels",
    "routing_replay",
    "eval",
    "plan",
    "rewards",
    "reward_faults",
    "hybrid",
    "quantised_cache",
    "hub",
    "trl",
    "models",
    "exact",
    "prompt_store",
    "kernels",
    "plan_windows",
    "longest",
    "batching",
    "report",
    "storage",
    "sharded",
    "bounded",
    "long_prefill",
    "one_pass",
    "four_bit",
    "wheel",
    "bench_rollout",
    "held_out",
    "bad_input",
    "notebook",
    "recipes",
    "shared_keys",
    "query_policies",
    "quantised_runs",
    "eval_budget",
    "trl_ranks",
    "compile",
    "refill_rejected",
    "plan_remedies",
    "engine",
    "model_folders",
]
"""Files that are begun first, the longest before the others: two processes that share the files then end at about the same
time."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Collect and run the tests as pytest does by itself, but faster."""
    others = config.pluginmanager.subset_hook_caller("pytest_cmdline_main", [sys.modules[__name__]])
    return in_one_chunk(others, config=config)


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # this process distributes the tests
    gc.disable()  # until all is imported
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before sparse_rl is imported
    if os.environ.get("TRITON_INTERPRET"):
        from interpreter import make_faster, spoil_padding

        make_faster()
        spoil_padding()


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """Exempt the objects of all imports from garbage collection: walking a million of them again and again takes seconds.
    Collect the others less often than by default, which takes one second in 25."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session")
def models():
    from random_models import ARCHITECTURES, random_model

    return {name: random_model(name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def model(models):
    return models["qwen2"]


@pytest.fixture(scope="session")
def tiny():
    from sparse_rl import load_model

    return load_model("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """What training runs need, see `small_runs.py`."""
    from small_runs import make_world

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
