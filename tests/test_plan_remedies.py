"""The plan's remedies: each makes the run fit, within the memory of the machine, and the fastest comes first."""

import itertools
import re

import pytest

from sparse_rl.cli import main
from sparse_rl.config import KV, Config
from sparse_rl.format import gib
from sparse_rl.plan import dimensions, make_plan, remedies
from sparse_rl.plan.host import host_plan
from sparse_rl.plan.memory import CONTEXT_BYTES
from sparse_rl.plan.remedies import WORTH_SHARE, faster, sentence, timed_sentence
from sparse_rl.plan.roofline import GPUS, find_gpu, step_time
from sparse_rl.train.budget_probe import remedy as probe_remedy
from test_plan import planned

GIB = 2**30


@pytest.mark.parametrize("method", ["sparse_rl", "dense"])
@pytest.mark.parametrize("slots", ["auto", "64"])
@pytest.mark.parametrize("checkpointing", ["auto", "false"])
def test_every_remedy_that_is_named_fits_and_takes_the_named_time(method, slots, checkpointing):
    flags = ["--method", method, "--rollout.slots", slots, "--optimizer.gradient-checkpointing", checkpointing]
    plan, gpu = planned(*flags), find_gpu("RTX 4090")
    assert not plan.fits
    found = remedies(plan, gpu)
    assert found and [each.step_s for each in found] == sorted(each.step_s for each in found)
    for remedy in found:
        with_it = planned(*flags, *remedy.flags.split())
        assert with_it.fits and step_time(with_it, gpu).total_s == pytest.approx(remedy.step_s), remedy.flags


def test_no_option_or_pair_of_options_is_clearly_faster_than_the_first_remedy():
    flags = ["--optimizer.gradient-checkpointing", "false", "--rollout.max-tokens", "8192"]
    gpu = find_gpu("H200")
    best = next(each for each in remedies(planned(*flags, model="7B", memory_gib=110), gpu) if not each.adapters)
    options = [("--optimizer.gradient-checkpointing", "auto"), ("--optimizer.tokens-per-microbatch", "8448"),
               ("--optimizer.state", "8bit"), ("--optimizer.state", "offload")]  # fmt: skip
    plans = [planned(*flags, *one, *other, model="7B", memory_gib=110) for one, other in itertools.product(options, repeat=2)]
    times = [step_time(plan, gpu).total_s for plan in plans if plan.fits]
    assert best.step_s <= min(times) / WORTH_SHARE < max(times)


@pytest.mark.parametrize("policy", ["my_module:Mine", "pkg.mod.Mine", "large-values"])
def test_a_custom_policy_is_not_advised_to_use_codes(policy):
    """It may refuse them."""
    gpu = find_gpu("RTX 4090")
    built_in, custom = (remedies(planned("--kv.policy", each), gpu) for each in ("rkv", policy))
    assert any("kv.dtype" in each.flags for each in built_in)
    assert custom and not any("kv.dtype" in each.flags for each in custom)
    assert "kv.dtype" in probe_remedy(KV(policy="rkv", budget="auto"), memory_limits=True)
    assert "kv.dtype" not in probe_remedy(KV(policy=policy, budget="auto"), memory_limits=True)


def test_a_remedy_keeps_to_the_memory_of_the_machine():
    plan, gpu = planned(model="7B", memory_gib=80), find_gpu("H100")
    assert any("offload" in each.flags for each in remedies(plan, gpu))
    within = remedies(plan, gpu, host_bytes=32 * GIB)
    assert within and all(host_plan(each.plan).peak_bytes <= 32 * GIB for each in within)


def test_a_remedy_that_needs_more_host_memory_names_it():
    plan, gpu = planned(model="7B", memory_gib=80), find_gpu("H100")
    found = remedies(plan, gpu)
    shown = timed_sentence(plan, found)
    more = [each for each in found if host_plan(each.plan).peak_bytes > host_plan(plan).peak_bytes]
    assert more and len(more) < len(found) and shown.count("GiB of host memory") == len(more)
    for each in more:
        assert re.search(rf"{each.flags} \([^)]* a step, {gib(host_plan(each.plan).peak_bytes)} GiB of host memory\)", shown)


def test_a_machine_with_too_little_memory_for_any_remedy_is_named(capsys):
    """A larger GPU would not help: the options that fit it need more host memory."""
    plan = planned(model="7B", memory_gib=23)
    assert "optimizer.state offload" in sentence(plan) or "--model.lora.rank 16" in sentence(plan)
    assert not remedies(plan, find_gpu("RTX 4090"), host_bytes=8 * GIB)
    words = r"--.*--model\.lora\.rank 16.* fits, but needs 14\.2 GiB of host memory, and the machine has 8\.00 GiB: use a larger machine"
    assert re.fullmatch(words, sentence(plan, host_bytes=8 * GIB))
    main(["plan", "7B", "--gpu", "RTX 4090", "--host-memory", "8GiB"])
    assert re.search(words, capsys.readouterr().out)
    assert sentence(planned(model="72B", memory_gib=8), host_bytes=8 * GIB).startswith(
        "no option of the plan makes the run fit"
    )


def test_responses_are_shortened_only_if_nothing_else_fits():
    plan = planned("--rollout.max-tokens", "65536", memory_gib=16)
    found = remedies(plan, find_gpu("RTX 4090"))
    assert found and all("--rollout.max-tokens 32768" in each.flags for each in found)
    assert not any("--rollout.max-tokens" in each.flags for each in remedies(planned(), find_gpu("RTX 4090")))


def test_a_run_that_barely_fits_is_shown_a_faster_way():
    config = Config(
        model={"path": "8B", "dtype": "bfloat16"}, rollout={"max_tokens": 16384}, ranks={"count": 8}, eval={"problems": 0}
    )
    plan = make_plan(config, dimensions("8B"), memory_bytes=GPUS["h100"].memory_bytes - CONTEXT_BYTES)
    found = faster(plan, GPUS["h100"])
    assert plan.fits and found.plan.fits and found.step_s < step_time(plan, GPUS["h100"]).total_s / 2
    assert faster(found.plan, GPUS["h100"]) is None


def test_the_faster_remedy_is_advised_first():
    """Offload alone fits, with few slots. Checkpointing alone is faster, because it leaves room for many."""
    flags, gpu = ["--optimizer.gradient-checkpointing", "false", "--rollout.max-tokens", "16384"], find_gpu("A6000")
    plan = planned(*flags, memory_gib=46.2)
    names = ("--optimizer.gradient-checkpointing auto", "--optimizer.state offload")
    alone = [planned(*flags, *name.split(), memory_gib=46.2) for name in names]
    checkpointed_s, offloaded_s = (step_time(each, gpu).total_s for each in alone)
    assert not plan.fits and all(each.fits for each in alone) and 1.5 * checkpointed_s < offloaded_s
    first, *others = (each for each in remedies(plan, gpu) if not each.adapters)
    assert first.flags == names[0] and first.step_s == pytest.approx(checkpointed_s)
    assert all(each.step_s > first.step_s for each in others)


@pytest.mark.parametrize(("host", "advised"), [("64GiB", True), ("32GiB", False)])
def test_an_offload_beyond_the_memory_of_the_machine_is_not_advised(host, advised, capsys):
    """The run fits with few slots. Offload would leave room for many, and takes 46 GiB of host memory."""
    flags = ["--optimizer.gradient-checkpointing", "true", "--optimizer.state", "8bit"]
    flags += ["--max-tokens", "8192", "--optimizer.tokens-per-microbatch", "8448"]
    main(["plan", "3B", "--gpu", "A6000", "--gpu-memory", "41.5GiB", *flags, "--host-memory", host])
    out = capsys.readouterr().out
    assert "The run fits: " in out and ("--optimizer.state offload" in out) is advised
