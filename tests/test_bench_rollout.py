"""The rules of `bench rollout`: what dense may hold in the same memory, and the length both rooflines are charged."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

from sparse_rl import KV, Engine, Sampling, load_model
from sparse_rl.bench.lengths import drawn_lengths, live_tokens
from sparse_rl.bench.rollout import same_memory
from sparse_rl.kv.policies import POLICIES
from sparse_rl.plan.roofline import mean_held


def simulated_live_tokens(lengths: list[int], slots: int) -> float:
    """Run the sequences one step at a time in slots that are refilled at once; mean tokens held per running sequence."""
    queue = list(lengths)
    starts, ends = [0] * slots, [queue.pop() for _ in range(slots)]
    held_tokens = sequence_steps = step = 0
    while queue:  # the tail, where slots stay empty, is left out
        for slot in range(slots):
            if step == ends[slot] and queue:
                starts[slot], ends[slot] = step, step + queue.pop()
            held_tokens += step - starts[slot]
        sequence_steps += slots
        step += 1
    return held_tokens / sequence_steps


def test_a_paged_cache_holds_current_lengths_not_final_ones():
    lengths = drawn_lengths(range(3000), 512)
    simulated = simulated_live_tokens(lengths, slots=16)
    assert live_tokens(lengths, prompt_tokens=0) == pytest.approx(simulated, rel=0.05)
    assert simulated < 0.7 * sum(lengths) / len(lengths)  # the mean of final lengths would charge dense too much


def test_a_shared_prompt_is_charged_once_per_group():
    assert live_tokens([100], prompt_tokens=256) - live_tokens([100], prompt_tokens=0) == 256 / 8


def test_dense_gets_the_bytes_of_the_sparse_cache_and_of_its_side_tables():
    model, kv = load_model("tiny", device="cpu"), KV(policy="rkv", budget=48, interval=16, protect_prompt=False)
    args = Namespace(batch=64, prompt_tokens=40, max_tokens=1024, lengths="full")
    engine = Engine(model, kv, slots=64)
    token_bytes = engine.cache.kv_bytes / (64 * kv.capacity)
    live = 1024 / 2 + 40 / 8
    slots, kv_bytes = same_memory(args, kv, model)
    assert kv_bytes == engine.cache.kv_bytes + engine.cache.side_bytes
    assert slots == int(1.5 * (kv_bytes // token_bytes) / live)
    dense = Engine(model, KV(policy="full"), slots=slots)
    dense.reserve_dense(40, 1024, 8, 8, kv_bytes=kv_bytes)
    assert 0.98 * kv_bytes < dense.cache.kv_bytes <= kv_bytes


@pytest.mark.parametrize("policy", ["rkv", "full"])
def test_the_roofline_charges_what_slots_hold_on_average(policy):
    kv, prompt, tokens = KV(policy=policy, budget=48, interval=16, protect_prompt=False), [5] * 40, 400
    engine = Engine(load_model("tiny", device="cpu"), kv, slots=2)
    engine.generate([prompt], 2, Sampling(max_tokens=tokens, stop=()), allow_beyond_context=True)
    stats = engine.stats
    measured = stats.kept_tokens / (2 * (tokens - 1))
    assert mean_held(kv, len(prompt), tokens, tokens / 2) == pytest.approx(measured, rel=0.02)


def test_the_speed_of_every_policy_is_measured_in_one_sitting(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    sizes = "--slots 2 --budget 16 --interval 4 --prompt-tokens 8 --max-tokens 32 --rounds 1"
    command = ["--model", "tiny", "--device", "cpu", *sizes.split(), "--json", str(tmp_path / "speed.json")]
    importlib.import_module("policy_speed").main(command)
    arms = json.loads((tmp_path / "speed.json").read_text())["arms"]
    assert [arm["policy"] for arm in arms] == list(POLICIES)
    for arm in arms:
        assert arm["rounds"][0]["tokens"] == 2 * 32 and arm["tokens_per_s"] > 0 and arm["decode_tokens_per_s"] > 0
