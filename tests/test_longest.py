"""`plan --longest`: the length it names fits and the next one does not, and it names what ends it."""

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from small_runs import one_thread, refused
from sparse_rl.cli import main
from sparse_rl.config import Config, recipe
from sparse_rl.plan import dimensions, make_plan
from sparse_rl.plan.host import host_plan
from sparse_rl.plan.longest import longest_response
from sparse_rl.plan.memory import CONTEXT_BYTES
from sparse_rl.plan.output import parse_size

ROOT = Path(__file__).parents[1]
GIB = 2**30
BF16 = {"dtype": "bfloat16"}
CASES = {
    "all weights": {"model": {"path": "1.5B", **BF16}, "optimizer": {"state": "8bit"}},
    "all weights, dense": {"model": {"path": "1.5B", **BF16}, "optimizer": {"state": "offload"}, "method": "dense"},
    "LoRA": {"model": {"path": "7B", **BF16, "lora": {"rank": 16, "merge": False}}},
    "LoRA, 64 slots": {"model": {"path": "1.5B", **BF16, "lora": {"rank": 16}}, "rollout": {"slots": 64}, "method": "dense"},
    "all layers recompute": {"model": {"path": "0.5B", **BF16}, "optimizer": {"gradient_checkpointing": True}},
    "no layer recomputes": {"model": {"path": "0.5B", **BF16}, "optimizer": {"gradient_checkpointing": False}},
    "shadow": {"model": {"path": "0.5B", **BF16}, "method": "on_policy_sparse"},
    "recipe": recipe("7b-lora-24gb"),
}


def found(values, memory_gib=24.0, **options):
    config = Config(**values)
    return longest_response(config, dimensions(config.model.path), memory_bytes=int(memory_gib * GIB), **options)


def fits(values, tokens, memory_gib, slots, prompt_tokens=256):
    """Whether a step of rollouts of this length fits, one rollout in a micro-batch. Config and plan are made anew."""
    optimizer = values.get("optimizer", {}) | {"tokens_per_microbatch": prompt_tokens + tokens}
    config = Config(**values | {"rollout": values.get("rollout", {}) | {"max_tokens": tokens}, "optimizer": optimizer})
    dims, memory_bytes = dimensions(config.model.path), int(memory_gib * GIB)
    return make_plan(config, dims, memory_bytes=memory_bytes, prompt_tokens=prompt_tokens, slots=slots).fits


@pytest.mark.parametrize("case", CASES)
def test_the_longest_response_fits_and_one_token_more_does_not(case):
    values = CASES[case]
    longest = found(values)
    slots = values.get("rollout", {}).get("slots", 8)
    assert longest.by_memory > 1024
    assert fits(values, longest.by_memory, 24, slots) and not fits(values, longest.by_memory + 1, 24, slots)
    assert longest.plan.fits and longest.plan.config.rollout.max_tokens == longest.tokens <= longest.by_memory
    assert longest.plan.slots == slots if "slots" in case else longest.plan.slots >= slots


def test_a_microbatch_shrinks_to_one_rollout_and_is_never_larger_than_configured():
    values = CASES["all weights"]
    few = found(values, 21).plan.config
    assert few.rollout.max_tokens + 256 == few.optimizer.tokens_per_microbatch < 16384
    for memory in (40, 140):
        many = found(CASES["LoRA"], memory).plan.config
        assert many.optimizer.tokens_per_microbatch == 16384 < many.rollout.max_tokens
    short = found({"model": {"path": "135M", **BF16}}, 80).plan  # its context is shorter than a micro-batch
    assert short.config.optimizer.tokens_per_microbatch == 16384 and short.config.rollout.max_tokens == 8192 - 256


def test_more_memory_is_longer_and_a_dense_cache_or_more_slots_shorter():
    lora = CASES["LoRA"]
    lengths = [found(lora, memory).by_memory for memory in (10, 16, 24, 80, 140)]
    assert lengths[0] == 0 and lengths[1:] == sorted(set(lengths[1:]))
    dense = lora | {"method": "dense"}
    assert found(dense).by_memory < found(lora).by_memory
    assert found(dense | {"rollout": {"slots": 32}}).by_memory < found(dense).by_memory
    assert found(lora, prompt_tokens=4096).by_memory < found(lora).by_memory


def test_the_context_of_the_model_is_a_limit(tmp_path):
    longest = found(CASES["shadow"] | {"method": "sparse_rl"}, 140)
    assert (longest.tokens, longest.bound) == (32768 - 256, "context") and longest.by_memory > longest.tokens
    config = {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
    }
    config |= {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn}))
    stretched = found({"model": {"path": str(tmp_path), **BF16}}, 140)
    assert (stretched.tokens, stretched.bound) == (131072 - 256, "context")
    assert found(CASES["all weights"], 24).bound == "update"  # the fullest phase


def test_a_prompt_that_fills_the_context_leaves_no_response():
    assert found(CASES["LoRA"], 80, prompt_tokens=32768).tokens == 0


def test_host_memory_is_a_limit_if_it_is_given():
    values = CASES["all weights, dense"]  # the offloaded state takes 23 GiB
    free, bounded = found(values, 24), found(values, 24, host_bytes=24 * GIB)
    assert free.bound != "host memory" == bounded.bound and 0 < bounded.tokens < free.tokens
    assert host_plan(bounded.plan).peak_bytes <= 24 * GIB
    longer = bounded.plan.config.rollout.model_copy(update={"max_tokens": bounded.tokens + 1})
    longer = bounded.plan.config.model_copy(update={"rollout": longer})
    assert host_plan(make_plan(longer, dimensions("1.5B"))).peak_bytes > 24 * GIB


@pytest.mark.parametrize(("host", "advised"), [("64GiB", True), ("8GiB", False)])
def test_an_answer_advises_no_offload_beyond_the_memory_of_the_machine(host, advised, capsys):
    main(["plan", "1.5b-full-24gb", "--longest", "--gpu-memory", "12GiB", "--host-memory", host])
    out = capsys.readouterr().out
    assert "No response trains in 12GiB" in out and ("--optimizer.state offload" in out) is advised


@pytest.mark.parametrize("longest", [[], ["--longest"]])
def test_a_warning_about_this_machine_says_how_to_plan_for_another(longest, capsys, monkeypatch):
    for module in ("output", "longest"):
        monkeypatch.setattr(f"sparse_rl.plan.{module}.machine_bytes", lambda: 8 * GIB)
    main(["plan", "7b-lora-24gb", "--gpu-memory", "24GiB", *longest])
    assert "pass its memory with --host-memory." in " ".join(capsys.readouterr().out.split())
    main(["plan", "7b-lora-24gb", "--gpu-memory", "24GiB", "--host-memory", "64GiB", *longest])
    assert "warning" not in capsys.readouterr().out


def test_the_table_of_a_model(capsys, tmp_path):
    main(["plan", "1.5B", "--longest", "--gpu-memory", "24GB,80GB", "--json", str(tmp_path / "longest.json")])
    out = capsys.readouterr().out
    assert "Computed" in out and "24GB" in out and "80GB" in out
    record = json.loads((tmp_path / "longest.json").read_text())
    rows = {(row["trained"], row["optimizer_state"], row["sampler"]): row for row in record["rows"] if row["memory"] == "24GB"}
    assert len(rows) == 10 and len(record["rows"]) == 20
    memory = (parse_size("24GB") - CONTEXT_BYTES) / GIB
    lora = found({"model": {"path": "1.5B", **BF16, "lora": {"rank": 16, "merge": False}}}, memory)
    row = rows["LoRA rank 16", "fp32", "triattention 512+128"]
    assert (row["tokens"], row["tokens_by_memory"], row["bound"]) == (lora.tokens, lora.by_memory, lora.bound)
    assert row["slots"] == lora.plan.slots and row["peak_bytes"] == lora.plan.peak_bytes
    assert rows["all weights", "fp32", "dense"]["tokens"] == 0 and "none" in out
    assert f"{lora.tokens:,}" in out
    assert "context of 32,768" in out


def test_the_answer_for_a_recipe(capsys):
    main(["plan", "7b-lora-24gb", "--longest", "--gpu-memory", "24GiB"])
    out = capsys.readouterr().out
    longest = found(CASES["recipe"], (24 * GIB - CONTEXT_BYTES) / GIB)
    assert f"rollout.max_tokens = {longest.tokens:,}" in out and "update" in out and "Computed" in out
    assert f"{longest.plan.slots} slots" in out and "host memory" in out.lower()
    main(["plan", "7b-lora-24gb", "--longest", "--gpu-memory", "16GB"])
    out = capsys.readouterr().out
    assert "No response trains" in out


def test_the_flags_for_a_recipe_with_a_penalty_on_long_responses_are_valid(capsys):
    command = ["plan", "7b-lora-24gb", "--gpu-memory", "18GiB", "--advantage.overlong", "4096"]
    main([*command, "--longest"])
    flags = re.search(r"^Flags: (.*)$", capsys.readouterr().out, flags=re.MULTILINE)[1].split()
    assert int(flags[1]) < 4096
    main([*command, *flags])
    assert "The run fits" in capsys.readouterr().out


def test_a_length_and_the_longest_length_are_not_asked_together(capsys):
    line = refused(capsys, "plan", "1.5B", "--longest", "--max-tokens", "4096")
    assert line == "--rollout.max-tokens 4096 has no effect with --longest, which searches for it: remove one of them."
    assert "not a valid size" in refused(capsys, "plan", "1.5B", "--longest", "--gpu-memory", "24GB,much")


def test_the_documented_lengths_are_those_of_the_plan():
    page = (ROOT / "docs/plan.md").read_text()
    lines = re.findall(r"^\| (1.5B|7B), (all weights|LoRA) \| (.*) \| (.*) \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(lines) == 4
    for shape, trained, *cells in lines:
        for size, text in zip(("24GB", "80GB", "141GB"), cells, strict=True):
            thousands, state = re.fullmatch(r"(\d+|none)(?: \((.*)\))?", text.replace("*", "")).groups()
            lora = {"rank": 16, "merge": False} if trained == "LoRA" else {}
            values = {"model": {"path": shape, **BF16, "lora": lora}, "optimizer": {"state": state or "fp32"}}
            values |= {"rollout": {"prompts_per_step": 1, "samples_per_prompt": 2}, "eval": {"problems": 0}}
            values |= {"kv": {"policy": "rkv", "protect_prompt": False}}  # as measured
            tokens = found(values, (parse_size(size) - CONTEXT_BYTES) / GIB).by_memory
            written = 0 if thousands == "none" else int(thousands)
            assert tokens / 1000 == pytest.approx(written, rel=0.02, abs=0.5), f"{shape} {trained} {size}: {tokens:,} tokens"


# The script that measures it


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("longest", ROOT / "benchmarks/longest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_the_planned_length_and_one_a_tenth_longer(script, tmp_path, monkeypatch, capsys):
    """The longer one in a process of its own, and not again when it is asked again."""
    out = tmp_path / "longest.json"
    flags = ["--shapes", "tiny", "--memory", "618MB", "--prompt-tokens", "16", "--cases", "LoRA", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["longest.py", *flags, "--factors", "1.1"])
    script.main()
    assert "already" not in capsys.readouterr().out
    script.main()
    assert "already" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["benchmark"] == "longest" and record["seed"] == 0 and record["versions"]["torch"]
    (case,) = record["cases"]
    assert (case["shape"], case["trained"], case["memory"], case["state"]) == ("tiny", "LoRA rank 16", "618MB", "fp32")
    (longer,) = case["runs"]
    assert case["planned_tokens"] > 128 and longer["tokens"] == round(1.1 * case["planned_tokens"]) and not longer["sampled"]
    settings = {"tokens": case["planned_tokens"], "sample": False, "prompt_tokens": 16}
    with one_thread():
        planned = settings | script.run(case | settings)
    for run in (planned, longer):
        assert run["trained"] and run["trained_tokens"] == run["tokens"]
        assert run["seconds"] > 0 and run["grad_norm"] > 0 and not run["out_of_memory"]
        assert run["peak_bytes"] is None  # the allocator of a CPU counts nothing
    room = parse_size("618MB") - CONTEXT_BYTES
    assert planned["planned_needed_bytes"] <= room < longer["planned_needed_bytes"]


def test_the_script_runs_a_whole_step(script):
    case = script.plan_case("tiny", "full", "622MB", argparse.Namespace(prompt_tokens=16, sample=True))
    assert case["planned_tokens"] > 128
    with one_thread():
        run = script.run(case | {"tokens": 150, "sample": True, "prompt_tokens": 16})
    assert run["trained"] and run["trained_tokens"] == 2 * 150 and run["seconds"] == run["phases_s"]["step_s"] > 0
