"""The plan's guidance: budgets beside dense, where sparse wins, what was measured, and fewer prompts per step."""

import gzip
import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, MistralConfig

from sparse_rl.cli import main
from sparse_rl.config import Config, recipe
from sparse_rl.format import duration
from sparse_rl.kv.cache import SlotCache
from sparse_rl.kv.shape import CacheShape
from sparse_rl.kv.storage import KeyScales, Quantiser
from sparse_rl.plan import dimensions, make_plan
from sparse_rl.plan.budgets import (
    FASTER,
    MEASURED,
    MEASURED_BITS,
    MEASURED_DENSE,
    MEASURED_TRIATTENTION,
    bits_advice,
    evidence,
    fewer_prompts,
    sweep,
    winning_budget,
    winning_length,
)
from sparse_rl.plan.memory import CONTEXT_BYTES
from sparse_rl.plan.output import fit_table
from sparse_rl.plan.roofline import GPUS, step_time, steps_s
from sparse_rl.sizes import PAGE_TOKENS, pages_of

CARD = GPUS["rtx 4090"]
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/choosing-a-budget.md").read_text()
LONG = {"max_tokens": 8192}


def planned(memory_bytes=CARD.memory_bytes - CONTEXT_BYTES, model="1.5B", **sections):
    values = recipe("1.5b-full-24gb")
    values["model"]["path"] = model
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return make_plan(Config(**values), dimensions(model), memory_bytes=memory_bytes)


def alone(plan, **kv):
    """Plan a run of its own with these cache options, or dense without."""
    config = plan.config.model_copy(
        update={"kv": plan.config.kv.model_copy(update=kv), "method": plan.config.method if kv else "dense"}
    )
    return make_plan(config, plan.dims, memory_bytes=plan.memory_bytes, prompt_tokens=plan.prompt_tokens)


def test_a_row_is_the_plan_of_a_run_with_that_budget():
    plan = planned(rollout=LONG, kv={"protect_prompt": False})
    *sparse, bits, dense = sweep(plan, CARD)
    assert [row.share for row in sparse] == sorted(row.share for row in sparse)
    assert any(row.plan.config.kv == plan.config.kv for row in sparse)
    for row in sparse:
        made = alone(plan, budget=row.plan.config.kv.budget)
        assert (row.plan.slots, row.step_s) == (made.slots, step_time(made, CARD).total_s)
        assert row.share == row.plan.config.kv.budget / (256 + 8192)
    assert dense.name == "dense" and dense.step_s == step_time(alone(plan), CARD).total_s
    quantised = alone(plan, policy="full", dtype="4bit")
    assert (bits.name, bits.share, bits.step_s) == ("full 4bit", 1.0, step_time(quantised, CARD).total_s)
    assert bits.plan.pages > dense.plan.pages
    times = [row.step_s for row in sparse]
    assert times == sorted(times)  # a larger budget leaves fewer slots


@pytest.mark.parametrize(("kind", "has_row"), [(MistralConfig, False), (Gemma2Config, True)])
def test_only_models_with_layers_for_codes_have_a_row_for_them(kind, has_row, tmp_path, capsys):
    """Windows are not quantised, and this Mistral has one in every layer."""
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    kind(**sizes, num_attention_heads=4, num_key_value_heads=4, sliding_window=64).save_pretrained(tmp_path)
    main(["plan", "1.5b-full-24gb", "--model.path", str(tmp_path), "--gpu", "RTX 4090"])
    out = capsys.readouterr().out
    assert "triattention 512+128" in out and "dense" in out and ("4bit" in out) is has_row


def test_a_cache_of_all_keys_has_no_largest_budget():
    evicting, whole = ({"policy": policy, "dtype": "4bit"} for policy in ("triattention", "full"))
    for kv, named in ((evicting, True), (whole, False)):
        largest, of_dense = fit_table(planned(rollout=LONG, kv=kv)).columns[-1].cells
        assert largest.isdigit() is named and of_dense == ""


def test_a_protected_prompt_counts_in_the_share():
    plan = planned(rollout=LONG, kv={"protect_prompt": True})
    for row in sweep(plan, CARD)[:-2]:
        assert row.share == (256 + row.plan.config.kv.budget) / (256 + 8192)


def test_sparse_wins_up_to_the_named_budget():
    plan = planned(rollout=LONG)
    dense_s = step_time(alone(plan), CARD).total_s
    budget = winning_budget(plan, CARD, dense_s)
    at, above = (step_time(alone(plan, budget=each), CARD).total_s for each in (budget, budget + 64))
    assert at <= FASTER * dense_s < above
    assert winning_budget(plan, CARD, 0.5 * step_time(plan, CARD).total_s) < plan.config.kv.budget


def test_sparse_wins_from_the_named_length_on():
    plan = planned()
    length = winning_length(plan, CARD)
    for tokens, wins in ((length // 2, False), (length, True), (2 * length, True)):
        made = planned(rollout={"max_tokens": tokens})
        assert (step_time(made, CARD).total_s <= FASTER * step_time(alone(made), CARD).total_s) is wins


def test_the_evidence_is_that_of_the_page():
    rows = re.findall(r"^\| R-KV \d+(?: \(three seeds\))? \| ([\d.]+) \| (\d+) % \| ([\d.]+) % \|", PAGE, flags=re.MULTILINE)
    assert {float(share): (int(rejected), float(passed)) for share, rejected, passed in rows} == MEASURED
    assert re.search(r"mean of ([\d.]+) %", PAGE)[1] == str(MEASURED_DENSE)
    bits = re.search(
        r"all keys in 4 bits ends at ([\d.]+) % right.*, dense training at ([\d.]+) .*\. It rejects ([\d.]+) % at first and (\d+) %",
        PAGE.replace("\n", " "),
    )
    first, last, trained, dense = MEASURED_BITS
    assert bits.groups() == (str(trained), str(dense), str(first), str(last))
    runs, dense_runs = long_answers("dense-4bit"), long_answers("dense")
    rejected = [
        [100 * row["sparse/rejection_rate"] for run in runs for row in run[part]] for part in (slice(1, 6), slice(16, 21))
    ]
    assert [round(statistics.mean(part), digits) for part, digits in zip(rejected, (1, 0), strict=True)] == [first, last]
    scores = [[100 * run[20]["eval/test/pass@1"] for run in each] for each in (runs, dense_runs)]
    assert [round(statistics.mean(each), 1) for each in scores] == [trained, dense]


def long_answers(arm):
    """Return the rows of each seed of an arm with long answers."""
    found = []
    for path in sorted((ROOT / "experiments/evidence/l-long/raw").glob(f"{arm}-?.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            found.append([json.loads(line) for line in file])
    return found


@pytest.mark.parametrize(
    "kv",
    [
        {"policy": "rkv", "budget": 512, "interval": 128, "protect_prompt": False},
        {"policy": "streaming", "budget": 1024, "interval": 256, "dtype": "8bit"},
        {"budget": 2048, "interval": 512, "dtype": "4bit"},
    ],
)
def test_the_length_from_which_eviction_saves_bytes_is_named(kv):
    """Counted from storage: answers of that length take as many bytes in 4 bits as the budget does, to two digits."""
    made = planned(kv=kv)
    samples, prompt = made.config.rollout.samples_per_prompt, pages_of(made.prompt_tokens) * PAGE_TOKENS
    shape = CacheShape(28, 12, 2, 128, torch.bfloat16, torch.device("meta"))

    def bytes_of(slot_tokens, ring, paged_tokens, dtype):
        quantiser = None if dtype == "auto" else Quantiser(dtype, KeyScales.unset(28, 2, 128, shape.device))
        cache = SlotCache(shape, 1, slot_tokens, ring, quantiser=quantiser)
        return cache.kv_bytes + cache.side_bytes + paged_tokens * cache.token_bytes

    own = made.config.kv
    stored = prompt / samples if own.protect_prompt else 0
    evicting = bytes_of(own.capacity, own.recent if own.policy == "rkv" else 0, stored, own.dtype)
    length = int(
        re.search(rf"fewer than those of {re.escape(own.label)} up to answers of about ([\d,]+) tokens", bits_advice(made))[
            1
        ].replace(",", "")
    )
    below, above = (bytes_of(64, 0, prompt / samples + tokens / 2, "4bit") for tokens in (length, 1.1 * length))
    assert below <= evicting < above


@pytest.mark.parametrize(("share", "said"), [(0.9, "at 65%"), (0.45, "at 42%"), (0.25, "at 25%"), (0.1, "at 25%")])
def test_the_evidence_is_never_from_a_larger_share_without_saying_so(share, said):
    text = evidence(share, "rkv")
    assert f"Measured with R-KV {said}: " in text and "TriAttention" not in text
    assert ("No run with less than 25% was measured" in text) is (share < 0.25)


def test_the_evidence_of_the_default_policy_has_its_own_figures():
    """Those of the shoot-out, which no training run has followed yet."""
    text = evidence(0.25, "triattention")
    assert text.startswith(evidence(0.25, "rkv"))
    for (task, rejected), folder in zip(MEASURED_TRIATTENTION.items(), ("long", "math", "gsm8k"), strict=True):
        file = ROOT / "experiments/shootout/results" / folder / "triattention_protected_recent_0.2.json"
        assert rejected == round(100 * json.loads(file.read_text())["rejected"], 1)
        assert f"{rejected}% of answers to {task}" in text


def test_the_table_of_the_page_is_computed():
    """The slots and step times that help to decide whether a bounded cache is needed."""
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+, [\d,]+ s \| .*?) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    for tokens, cells in rows:
        plan = planned(rollout={"max_tokens": int(tokens.replace(",", ""))})
        arms = [alone(plan, budget=budget, interval=budget // 4) for budget in (512, 1024, 2048)] + [alone(plan)]
        assert cells.split(" | ") == [f"{arm.slots}, {step_time(arm, CARD).total_s:,.0f} s" for arm in arms]


def test_the_sweep_of_the_page_is_computed():
    page = (ROOT / "docs/plan.md").read_text()
    shown = re.findall(
        r"^\| ([\d,]+|dense|full 4bit) \| (\d+) % \| (\d+) \| (\d+) s \| (\S+ h) \| (\S+)x \|$", page, flags=re.MULTILINE
    )
    rows = sweep(planned(rollout=LONG), CARD)
    computed = {
        row.name if row.share == 1 else f"{row.plan.config.kv.budget:,}": (
            f"{100 * row.share:.0f}",
            str(row.plan.slots),
            f"{row.step_s:.0f}",
            duration(steps_s(row.plan, CARD)),
            f"{rows[-1].step_s / row.step_s:.2f}",
        )
        for row in rows
    }
    assert len(shown) == 6
    for budget, *cells in shown:
        assert computed[budget] == tuple(cells)


def test_fewer_prompts_are_named_where_a_long_step_fills_the_slots_several_times():
    plan = planned(rollout={**LONG, "prompts_per_step": 512})
    line = fewer_prompts(plan, CARD)
    prompts = int(re.search(r"--rollout.prompts-per-step (\d+)", line)[1])
    assert 0 < prompts * plan.config.rollout.samples_per_prompt <= plan.running
    made = planned(rollout={**LONG, "prompts_per_step": prompts})
    for seconds in (step_time(made, CARD).total_s, steps_s(made, CARD), step_time(plan, CARD).total_s):
        assert duration(seconds) in line
    assert fewer_prompts(made, CARD) is None
    assert fewer_prompts(planned(rollout={"max_tokens": 512}), CARD) is None  # a short step


def test_the_command_shows_budgets_hours_and_no_evaluation_of_a_model_alone(tmp_path, capsys):
    main(["plan", "4B", "--max-tokens", "8192", "--gpu", "H200", "--json", str(tmp_path / "plan.json")])
    out = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["budgets"][-1]["sampler"] == "dense" and f"{written['budgets'][0]['step_time_computed_s']:,.1f}" in out
    assert "100 steps" in out and "A sparse step is at least 5% faster than dense up to a budget of " in out
    assert "docs/choosing-a-budget.md" in out
    assert "evaluation cache" not in out and "No evaluation (eval.problems = 0)." in out
    main(["plan", "4B", "--data.test", "arithmetic", "--gpu", "H200"])
    assert "evaluation cache" in capsys.readouterr().out


def test_budgets_of_a_run_that_does_not_fit_are_those_of_a_remedy(capsys):
    main(["plan", "7B", "--gpu-memory", "80GiB"])
    out = " ".join(capsys.readouterr().out.split())
    assert "Budgets on H100 with --optimizer.state offload, with as many slots as fit" in out
    assert re.search(r"the plan fits with --\S.*? \(\d+ min a step\), or --optimizer.state offload \(\d+ min a step, ", out)
