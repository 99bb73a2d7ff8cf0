"""The rules of `bench rollout`: what dense may hold in the same memory, and the length both rooflines are charged."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

from sparse_rl import KV, Engine, Sampling, UserError, load_model
from sparse_rl.bench.lengths import drawn_lengths, live_tokens
from sparse_rl.bench.rollout import dense_arm, dense_slots, engine_arm
from sparse_rl.kv.policies import POLICIES
from sparse_rl.plan.roofline import mean_held
from test_windows import family as windowed


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


@pytest.mark.parametrize(
    ("family", "policy", "dtype"),
    [("tiny", "rkv", "auto"), ("tiny", "full", "4bit"), ("gemma3", "rkv", "8bit")],
)
def test_dense_gets_the_bytes_of_the_sparse_cache_and_of_its_side_tables(family, policy, dtype):
    model = load_model("tiny", device="cpu") if family == "tiny" else windowed(family)
    args = Namespace(batch=24, waves=1, prompt_tokens=40, max_tokens=50, lengths="full", seed=0, same_memory=True)
    sparse = engine_arm(model, KV(policy=policy, budget=48, interval=16, dtype=dtype), 24, args)
    dense = dense_arm(model, args, sparse)
    allowed = sparse.kv_bytes + sparse.side_bytes
    assert 0.9 * allowed < dense.kv_bytes <= allowed
    assert dense.slots < 24 and dense.tokens == sparse.tokens == 24 * 50


def test_a_cache_too_small_for_one_dense_sequence_is_refused():
    model, args = load_model("tiny", device="cpu"), Namespace(prompt_tokens=40, max_tokens=1024, lengths="full")
    with pytest.raises(UserError, match="too few for a dense sequence of 1,064 tokens: raise --batch"):
        dense_slots(model, args, 100_000)


@pytest.mark.parametrize("policy", ["rkv", "full"])
def test_the_roofline_charges_what_slots_hold_on_average(policy):
    kv, prompt, tokens = KV(policy=policy, budget=48, interval=16, protect_prompt=False), [5] * 40, 200
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
