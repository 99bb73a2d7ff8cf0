"""A training run from the command line: every method and loss learns, and the run folder holds what it promises."""

import gc
import io
import json
import math
import os
import re
import shutil
import sys
import tomllib
from collections import Counter
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from small_runs import arguments, metrics, one_thread, refused, train
from sparse_rl import KV, NEVER, Engine, Sampling, UserError, load_model, load_tokenizer, replay
from sparse_rl.cli import main
from sparse_rl.config import Config, CorrectionConfig, LoraConfig, OptimizerConfig
from sparse_rl.kv.cache import CacheShape
from sparse_rl.learner.batch import make_one_pass_batch
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.learner.packing import pack_tokens, packs
from sparse_rl.models.actor import Actor
from sparse_rl.rewards.pool import pool_for
from sparse_rl.rollout.clock import device_time
from sparse_rl.rollout.stats import Progress
from sparse_rl.scores import score_text
from sparse_rl.train import held_out, loggers, trainer
from sparse_rl.train import step as training_step
from sparse_rl.train.checkpoint import State
from sparse_rl.train.health import Health
from sparse_rl.train.preflight import largest_microbatch, preflight, try_sampler
from sparse_rl.train.refusal import is_final
from sparse_rl.train.rollout_log import SCHEMA
from sparse_rl.train.rollouts import RolloutBatch, RolloutGroup, RolloutSampler, Sample
from sparse_rl.train.run import arm
from sparse_rl.train.terminal import RunTerminal

METRICS = {
    "sparse": "rejection_rate unlikely wasted_tokens mismatch_k1 mismatch_k3 xi_p05 xi_min ess effective engine_noise",
    "reward": "mean std zero_std_groups no_verdict timeouts errors",
    "kv": "token_savings peak_bytes dense_bytes peak_tokens evictions budget",
    "policy": "loss clip_ratio entropy grad_norm lr skipped_updates",
    "response": "mean_tokens truncated repetition",
    "perf": "step_s rollout_s learner_s rollout_tokens_per_s learner_tokens_per_s",
}
KEYS = {f"{section}/{name}" for section, names in METRICS.items() for name in names.split()}

LORA = ["--model.lora.rank", "2"]
UNMERGED = [*LORA, "--model.lora.merge", "false"]
REFERENCE = ["--loss.kl-coef", "0.01"]
ENTROPY = ["--loss.entropy-coef", "0.01"]
TWO_UPDATES = ["--optimizer.updates-per-step", "2"]
CHECKPOINTING = ["--optimizer.gradient-checkpointing", "true"]
EIGHT_BIT = ["--optimizer.state", "8bit"]
OFFLOAD = ["--optimizer.state", "offload", "--model.dtype", "bfloat16"]
COSINE = ["--optimizer.schedule", "cosine", "--optimizer.warmup-steps", "1"]
BACKWARDS = ["--loss.smd.direction", "shadow_to_dense"]
MIDPOINT = ["--loss.smd.direction", "jsd", "--loss.smd.top-k", "8"]
MICROBATCHES = ["--optimizer.tokens-per-microbatch", "30"]

RUNS = [  # every method with every loss, every option with several of them
    ("dense", "grpo", []),
    ("dense", "dr_grpo", LORA + REFERENCE),
    ("dense", "dapo", CHECKPOINTING + ENTROPY),
    ("dense", "gspo", UNMERGED + TWO_UPDATES),
    ("dense", "cispo", EIGHT_BIT),
    ("naive", "grpo", OFFLOAD + TWO_UPDATES),
    ("naive", "dr_grpo", ENTROPY + COSINE),
    ("naive", "dapo", LORA + EIGHT_BIT),
    ("naive", "gspo", REFERENCE + CHECKPOINTING),
    ("naive", "cispo", UNMERGED),
    ("sparse_rl", "grpo", LORA + REFERENCE + COSINE),
    ("sparse_rl", "dr_grpo", TWO_UPDATES + EIGHT_BIT),
    ("sparse_rl", "dapo", OFFLOAD + REFERENCE),
    ("sparse_rl", "gspo", MICROBATCHES),
    ("sparse_rl", "cispo", LORA + CHECKPOINTING + ENTROPY),
    ("smd", "grpo", REFERENCE + ENTROPY),
    ("smd", "dr_grpo", UNMERGED + BACKWARDS),
    ("smd", "dapo", LORA + MIDPOINT),
    ("smd", "gspo", OFFLOAD),
    ("smd", "cispo", CHECKPOINTING + TWO_UPDATES + COSINE),
    ("on_policy_sparse", "grpo", LORA + OFFLOAD),
    ("on_policy_sparse", "dr_grpo", CHECKPOINTING),
    ("on_policy_sparse", "dapo", ENTROPY + MICROBATCHES),
    ("on_policy_sparse", "gspo", LORA + TWO_UPDATES),
    ("on_policy_sparse", "cispo", REFERENCE + EIGHT_BIT),
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on a CPU that has none
@pytest.mark.parametrize(("method", "loss", "options"), RUNS, ids=[f"{method}-{loss}" for method, loss, _ in RUNS])
def test_every_method_learns_with_every_loss(world, tmp_path, method, loss, options):
    run = tmp_path / "run"
    with torch.compiler.set_stance("force_eager"):  # torchao compiles, which takes longer than all the rest
        train(world, run, "--method", method, "--loss.name", loss, "--rollout.max-tokens", "16", *options)
    before = load_file(world / "model/model.safetensors")
    adapted = options[:1] == LORA[:1]
    if adapted:
        after = load_file(run / "model/adapter_model.safetensors")
        assert all(bool(tensor.any()) for name, tensor in after.items() if "lora_B" in name)  # they start at zero
    else:
        after = load_file(run / "model/model.safetensors")
        assert any(not torch.equal(after[name], tensor.to(after[name].dtype)) for name, tensor in before.items())
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    noise = 0.1 if "bfloat16" in options else 1e-5
    for row in rows[1:]:
        assert set(row) >= KEYS
        assert row["sparse/engine_noise"] < noise and row["policy/skipped_updates"] == 0
        assert ("policy/kl_ref" in row) == ("--loss.kl-coef" in options)
        assert ("policy/distillation_kl" in row) == (method == "smd")
        assert (row["kv/evictions"] == 0) == (method == "dense")
    rates = [row["policy/lr"] for row in rows[1:]]
    assert rates == ([0.01, 0.01] if "cosine" not in options else [0.01, pytest.approx(0.01)])
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == ["step-1.parquet", "step-2.parquet"]
    stored = json.loads((run / "model/sparse_rl.json").read_text())["kv"]
    assert (stored["policy"], stored["budget"]) == (("full", 512) if method == "dense" else ("rkv", 20))


def test_the_learning_rate_warms_up_and_falls_as_a_cosine(world, tmp_path):
    train(world, tmp_path / "run", "--steps", "4", "--optimizer.schedule", "cosine", "--optimizer.warmup-steps", "2",
          "--rollout.max-tokens", "4", "--method", "dense")  # fmt: skip
    assert [row["policy/lr"] for row in metrics(tmp_path / "run")[1:]] == [0.005, 0.01, 0.01, pytest.approx(0.005)]


def test_held_out_problems_are_scored_before_and_after(world, tmp_path):
    train(world, tmp_path / "run", "--eval.problems", "3", "--data.test", str(world / "problems.jsonl"))
    keys = {f"eval/problems/pass@1{cache}{bound}" for cache in ("", "_sparse") for bound in ("", "_low", "_high")}
    keys |= {"eval/problems/no_verdict", "eval/problems/no_verdict_sparse", "eval/problems/graded"}
    scored = [{key for key in row if key.startswith("eval/")} for row in metrics(tmp_path / "run")]
    assert scored == [keys, set(), keys]


def test_problems_with_long_prompts_are_left_out_of_training_alone(world, tmp_path, capsys):
    """Also by --dry-run; what is too long nevertheless is named by its place in the file."""
    problems, run = tmp_path / "some-long.jsonl", tmp_path / "run"
    short = (world / "problems.jsonl").read_text()
    longer, too_long = (json.dumps({"prompt": "1" * number, "answer": "2"}) + "\n" for number in (40, 300))
    problems.write_text(too_long + longer + short + longer)
    (tmp_path / "test.jsonl").write_text(longer)
    tokens = 41  # one a digit, and the beginning of the text
    flags = ["--data.train", str(problems), "--data.test", str(tmp_path / "test.jsonl"), "--eval.problems", "1"]
    flags += ["--rollout.prompts-per-step", "8", "--data.max-prompt-tokens"]
    for last in ([], ["--dry-run"]):
        train(world, run, *flags, str(tokens - 1), *last)
        assert (
            f"3 of 11 problems of {problems} are skipped: a prompt may have at most data.max_prompt_tokens = 40 tokens."
            in " ".join(capsys.readouterr().out.split())
        )
    drawn = {row["prompt"] for path in (run / "rollouts").iterdir() for row in pq.read_table(path).to_pylist()}
    assert len(drawn) == 8 and max(map(len, drawn)) < 20
    assert "eval/test/pass@1" in metrics(run)[-1]
    for last in ([], ["--dry-run"]):  # neither of which protects: the longer ones lose a part
        train(world, run, *flags, str(tokens), "--overwrite", *last)
        out = " ".join(capsys.readouterr().out.split())
        assert (
            f"1 of 11 problems of {problems} is skipped: " in out
            and "2 of 10 prompts are longer than kv.budget = 20 (up to 41 tokens)" in out
        )
    assert "prompts: 9 to 41 tokens, median 9" in out


def test_protected_prompts_train_beyond_the_budget(world, tmp_path):
    """Prompts of more than twice the budget, sampled, evaluated and replayed; the store is reserved for the longest."""
    problems, run = tmp_path / "long.jsonl", tmp_path / "run"
    rows = [{"prompt": "1" * number, "answer": "2"} for number in (40, 70, 9, 130)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data.train", str(problems), "--data.test", str(problems), "--eval.problems", "4", "--eval.cache", "sparse"]
    flags += ["--kv.protect-prompt", "true", "--method", "smd", "--rollout.slots", "3", "--rollout.max-tokens", "28"]
    train(world, run, *flags)
    first, last = metrics(run)[1:]
    assert first["kv/peak_tokens"] > 41 and first["kv/evictions"] > 0 and first["kv/budget"] == 20
    token = 2 * 2 * 2 * 8 * 4
    assert first["kv/peak_bytes"] == last["kv/peak_bytes"] == (3 * 24 + 6 * 64) * token  # two prompts of three pages
    assert first["sparse/engine_noise"] < 1e-4 and "eval/long/pass@1_sparse" in last
    assert tomllib.loads((run / "config.toml").read_text())["format"] == 2
    train(world, run, *flags, "--steps", "3", "--resume")
    assert metrics(run)[-1]["step"] == 3


def test_the_plan_counts_the_longest_prompt_of_all(world, tmp_path, monkeypatch):
    """Of training and of evaluation: the dense sampler holds room for both."""
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "1" * 40, "answer": "2"}) + "\n")
    counted, plan_run = [], trainer.plan_run
    monkeypatch.setattr(trainer, "plan_run", lambda *of: counted.append(of[-1]) or plan_run(*of))
    train(world, tmp_path / "run", "--method", "dense", "--data.test", str(tmp_path / "test.jsonl"), "--eval.problems", "1")
    assert counted == [41]


def test_rollouts_are_written_down_rejected_ones_first(world, tmp_path):
    """Log-probs are those of the model before the step, traces are whole, and everything has its row."""
    run = tmp_path / "run"
    train(world, run, "--rollout.samples-per-prompt", "3", "--correction.veto", "0.3", "--rollout.temperature", "0.7",
          "--log.rollouts-per-step", "5", "--log.traces-per-step", "2")  # fmt: skip
    table = pq.read_table(run / "rollouts/step-1.parquet")
    assert table.schema.equals(SCHEMA)
    rows = table.to_pylist()
    rejected = [row["rejected"] for row in rows]
    assert len(rows) == 5 and rejected == sorted(rejected, reverse=True) and 0 < sum(rejected) < 5
    assert sum(rejected) / 6 == pytest.approx(metrics(run)[1]["sparse/rejection_rate"])
    model = AutoModelForCausalLM.from_pretrained(world / "model")
    for place, row in enumerate(rows):
        fed, answered = torch.tensor([row["prompt_tokens"] + row["tokens"]]), torch.tensor(row["tokens"])
        with torch.no_grad():
            logits = model(fed[:, :-1]).logits[0, len(row["prompt_tokens"]) - 1 :] / 0.7
        dense = logits.log_softmax(-1).gather(1, answered[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["dense_logprobs"]), dense, atol=1e-4, rtol=0)
        ratio = (torch.tensor(row["dense_logprobs"]) - torch.tensor(row["sampler_logprobs"])).exp()
        assert row["rejected"] == bool(ratio.min() < 0.3)
        assert row["verdict"] and row["reward"] == sum(map(ord, row["text"])) % 1009 and row["answer"] == "1"
        assert row["prompt"].endswith("+85=") and row["finish"] in ("stop", "length") and row["step"] == 1
        if place < 2:
            assert row["evicted_at_shape"] == [2, 2, fed.shape[1]]
            evicted_at = torch.tensor(row["evicted_at"]).view(row["evicted_at_shape"])
            assert int((evicted_at == NEVER).sum(-1).max()) <= 24 < fed.shape[1]  # budget + interval
        else:
            assert row["evicted_at"] is None and row["evicted_at_shape"] is None


def test_dapo_draws_again_for_groups_without_signal(world, tmp_path):
    """Every second prompt has a signal: steps draw until they have two of those, and learn from them alone."""
    run = tmp_path / "run"
    train(world, run, "--loss.name", "dapo", "--method", "dense", "--rollout.max-tokens", "8", "--log.rollouts-per-step", "99",
          "--steps", "3", reward="some")  # fmt: skip
    cursor = 0
    for step, row in enumerate(metrics(run)[1:], 1):
        firsts = pq.read_table(run / f"rollouts/step-{step}.parquet").to_pylist()[::2]  # of each group
        cursor += len(firsts)
        teaching = [first for first in firsts if first["advantage"]]
        assert len(teaching) == 2 and all(int(first["prompt"][0]) % 2 for first in teaching)
        assert row["reward/zero_std_groups"] == pytest.approx(1 - 2 / len(firsts)) and row["policy/skipped_updates"] == 0
    assert cursor > 6  # some were drawn again
    assert json.loads((run / "checkpoints/step-3/state.json").read_text())["cursor"] == cursor  # and none is drawn twice


@pytest.mark.parametrize(("cache", "suffixes"), [("sparse", {"_sparse"}), ("dense", {""}), ("both", {"", "_sparse"})])
def test_the_cache_of_the_evaluation_may_be_chosen(world, tmp_path, cache, suffixes):
    train(world, tmp_path / "run", "--steps", "1", "--eval.problems", "2", "--data.test", str(world / "problems.jsonl"),
          "--eval.cache", cache)  # fmt: skip
    for row in (metrics(tmp_path / "run")[0], metrics(tmp_path / "run")[-1]):
        scored = {key.removeprefix("eval/problems/pass@1") for key in row if key.startswith("eval/problems/pass@1")}
        assert {each for each in scored if not each.endswith(("_low", "_high"))} == suffixes


def test_prompts_with_the_longest_expected_answers_start_first():
    """If not all fit at once. A problem that has not been sampled yet counts as typical, and a longer prompt first."""
    config = Config(rollout={"samples_per_prompt": 2, "prompts_per_step": 4})
    prompts = [[1] * 5, [1] * 9, [1] * 5, [1] * 5]
    for slots in (4, 8):
        engine = SimpleNamespace(slots=slots)
        sampler = RolloutSampler(config, [], prompts, None, engine, None, None)
        sampler.mean_tokens = {"0": 100.0, "3": 900.0}
        take = sampler._work_queue(sampler._expected_tokens([0, 1, 2, 3]), prompts, 2)
        if slots == 8:
            assert take is None
        else:
            assert [take() for _ in range(5)] == [3, 1, 2, 0, None]


def test_refill_works_with_any_loss_and_can_be_turned_off(world, tmp_path):
    flags = ["--method", "dense", "--rollout.max-tokens", "8", "--steps", "2"]
    train(world, tmp_path / "refilled", *flags, "--loss.name", "gspo", "--rollout.refill", "true", reward="some")
    train(world, tmp_path / "once", *flags, "--loss.name", "dapo", "--rollout.refill", "false", reward="some")
    cursors = [
        json.loads((tmp_path / run / "checkpoints/step-2/state.json").read_text())["cursor"] for run in ("refilled", "once")
    ]
    assert cursors[0] > 4 == cursors[1]


def test_a_refill_that_never_finds_a_signal_ends_the_run(world, tmp_path, capsys):
    """One sentence that says why, after three steps."""
    with pytest.raises(SystemExit):
        train(world, tmp_path / "run", "--method", "dense", "--rollout.max-tokens", "8", "--steps", "9",
              "--rollout.refill", "true", reward="same")  # fmt: skip
    told = (
        "rollout.refill found no signal in 3 steps of 4 rounds of 2 prompts: no group had two different rewards, because the"
    )
    assert told in capsys.readouterr().err and len(metrics(tmp_path / "run")) == 4


def test_methods_are_compared_in_one_table(world, tmp_path, capsys):
    train(world, tmp_path / "both", "--compare", '["dense", "sparse_rl"]', "--steps", "1", "--eval.problems", "2",
          "--data.test", str(world / "problems.jsonl"))  # fmt: skip
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[:2] for row in cells] == [["dense", "dense"], ["sparse_rl", "dense"], ["", "rkv 20+4"]]
    assert "held-out mean reward before and after" in out and "KV allocated" in out
    rewards = [value for row in cells for value in re.findall(r"[-\d.e+]+", " ".join(row[2:4]))]
    assert len(rewards) == 3 * 2 * 3 and max(map(float, rewards)) > 1 and "%" not in cells[0][2]  # these are no shares
    assert cells[0][6] == "0%" and cells[1][6] != "0%"  # tokens saved
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"dense", "sparse_rl", "report.html"}


def test_the_time_left_counts_steps_and_not_the_setup_before_them(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("sparse_rl.train.terminal.time.monotonic", lambda: now[0])
    view = RunTerminal(Config(steps=5), Console(width=200))
    view.resume_at(1)
    now[0] += 60.0  # loads weights, evaluates and probes budgets
    for step in (2, 3):
        with view.sampling(step):
            now[0] += 2.0
        view.step(step, {"reward/mean": 0.5})
    assert [line.split("left ")[1] for line in capsys.readouterr().out.splitlines()] == ["0:00:06", "0:00:04"]


def test_output_in_a_file_is_plain_lines(world, tmp_path, capsys):
    train(world, tmp_path / "run")
    captured = capsys.readouterr()
    steps = [line for line in captured.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"] and all("reward" in line and "left" in line for line in steps)
    assert not set(captured.out + captured.err) & {"\r", "\x1b"} and captured.err == ""


def test_the_table_lives_on_a_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30)
    view = RunTerminal(Config(steps=20, run_dir="runs/[odd] name"), console)
    with view:
        for step in range(1, 21):
            with view.sampling(step) as progress:
                progress(Progress(finished=1, total=2, tokens=5, seconds=0.1, new={}, ended=[]))
            with view.learning(step):
                pass
            view.step(step, dict.fromkeys(KEYS, 0.5 if step % 2 else float("nan")))
        with view.evaluating("arithmetic", "sparse") as progress:
            progress(Progress(finished=0, total=2, tokens=0, seconds=0.0, new={}, ended=[]))
        key = "eval/arithmetic/pass@1"
        view.step(20, {key: 0.5, f"{key}_low": 0.25, f"{key}_high": 0.75})
        view.warn("[bold]not markup[/bold]")
    text = screen.getvalue()
    assert "20/20" in text and "sparse_rl in runs/[odd] name" in text and "warning: [bold]not markup[/bold]" in text
    assert "eval/arithmetic/pass@1 50.0% [25.0%, 75.0%]" in text


def test_tensorboard_gets_every_metric_once(world, tmp_path):
    """Also of a step that a resumed run does again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    flags = ["--log.to", '["tensorboard"]', "--checkpoint.every", "1", "--rollout.max-tokens", "4"]
    train(world, run, *flags)
    shutil.rmtree(run / "checkpoints/step-2")
    train(world, run, *flags, "--resume")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = metrics(run)
    assert set(events.Tags()["scalars"]) == set(rows[1]) - {"step"}
    for key in ("reward/mean", "policy/grad_norm"):
        assert [(event.step, event.value) for event in events.Scalars(key)] == [
            (row["step"], pytest.approx(row[key])) for row in rows[1:]
        ]


@pytest.mark.parametrize("merge", [True, False])
def test_with_adapters_the_sampler_stays_the_learner(world, merge):
    """After updates that change the policy beyond recognition, rollouts still replay to 1e-4."""
    model = load_model(str(world / "model"), dtype="float32", device="cpu")
    torch.manual_seed(0)
    actor = Actor(model, LoraConfig(rank=4, merge=merge))
    engine = Engine(actor.sampler, KV(policy="rkv", budget=20, interval=4, window=4, protect_prompt=False), slots=4)
    optimizer = Optimizer(actor.learner, OptimizerConfig(lr=0.2), steps=3)
    first = None
    with one_thread():
        for step in range(4):
            actor.merge()
            rollouts = engine.generate([[0, 7, 9, 11]], 4, Sampling(max_tokens=30, stop=()))
            actor.restore()
            with torch.no_grad():
                seen = replay(actor.learner, rollouts, "sparse")
            assert max(float((a.logprobs - b).abs().max()) for a, b in zip(rollouts, seen, strict=True)) < 1e-4
            first = first or rollouts
            for param in optimizer.params:
                param.grad = torch.randn(param.shape)
            optimizer.update(step)
            actor.sync()
        with torch.no_grad():
            moved = replay(actor.learner, first, "sparse")
    assert max(float((a.logprobs - b).abs().max()) for a, b in zip(first, moved, strict=True)) > 1


def test_adapters_merged_in_place_sample_like_a_merged_copy_and_leave_the_base(world):
    """In half precision, to the bit, in storage that stays where it is."""
    prompt, sampling = [[0, 7, 9, 11]], Sampling(max_tokens=20, stop=())
    found = []
    for merge in (True, False):
        model = load_model(str(world / "model"), dtype="bfloat16", device="cpu")
        base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        torch.manual_seed(0)
        actor = Actor(model, LoraConfig(rank=4, merge=merge))
        with torch.no_grad():
            for name, weight in actor.learner.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.5)
        actor.sync()
        storage = [weight.data_ptr() for weight in actor.sampler.parameters()]
        actor.merge()
        found.append(Engine(actor.sampler, slots=2).generate(prompt, 2, sampling))
        assert actor.is_merged == (not merge)
        actor.restore()
        assert [weight.data_ptr() for weight in actor.sampler.parameters()] == storage
        learned = dict(actor.learner.named_parameters())
        for name, weight in base.items():
            wrapped = name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
            assert torch.equal(learned[wrapped if wrapped in learned else name], weight)
    for left, right in zip(*found, strict=True):
        assert left.response == right.response and torch.equal(left.logprobs, right.logprobs)


def test_tied_weights_are_not_merged_in_place(world):
    """The sampler's head would change with the embedding."""
    model = load_model(str(world / "model"), dtype="float32", device="cpu")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with pytest.raises(
        UserError, match="cannot adapt tied weights .model.lora.targets = q_proj,embed_tokens.: omit embed_tokens"
    ):
        Actor(model, LoraConfig(rank=2, targets="q_proj,embed_tokens", merge=False))


def test_the_merged_copy_shares_what_has_no_adapter(world):
    model = load_model(str(world / "model"), dtype="float32", device="cpu")
    weights = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    actor = Actor(model, LoraConfig(rank=2, targets="q_proj,down_proj"))
    sampler = dict(actor.sampler.named_parameters())
    own = {name for name, tensor in sampler.items() if tensor.data_ptr() != weights[name]}
    assert own == {name for name in sampler if "q_proj.weight" in name or "down_proj.weight" in name}
    before = {name: sampler[name].data_ptr() for name in own}
    actor.sync()
    assert {name: dict(actor.sampler.named_parameters())[name].data_ptr() for name in own} == before  # rewritten in place


def test_nothing_of_a_run_stays_behind(world, tmp_path):
    """Neither tensors nor the processes of the reward."""

    def live_tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    train(world, tmp_path / "first", "--steps", "1", reward="tells_its_pid")
    before = live_tensors()
    train(world, tmp_path / "second", "--steps", "1", reward="tells_its_pid")
    assert live_tensors() <= before
    for run in ("first", "second"):
        pids = {int(line.split()[1]) for line in (tmp_path / run / "reward.log").read_text().splitlines()}
        assert pids
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_comparison_gives_the_correction_to_sparse_rl_alone():
    config = Config(compare=["naive", "smd", "sparse_rl"], correction={"preset": "released", "veto": 0.01})
    points = {method: arm(config, method) for method in config.compare}
    assert points["sparse_rl"].correction.preset == "released" and points["sparse_rl"].correction.veto == 0.01
    assert points["naive"].correction == points["smd"].correction == CorrectionConfig()


@pytest.mark.parametrize("option", [{"preset": "paper"}, {"veto": 0.1}, {"cap": 2.0, "weight": "token"}])
def test_methods_on_the_samplers_own_view_take_no_correction(option):
    with pytest.raises(UserError, match="has no effect with method"):
        Config(method="smd", correction=option)


def test_the_rehearsal_is_the_fullest_micro_batch():
    """Never more tokens than a micro-batch takes, and fewer only by less than another prompt."""
    for prompt, max_tokens, tokens in ((10, 100, 1000), (500, 4096, 16384), (500, 9000, 16384), (5, 64, 69), (5, 64, 20)):
        config = Config(
            rollout={"max_tokens": max_tokens, "prompts_per_step": 8, "samples_per_prompt": 8},
            optimizer={"tokens_per_microbatch": tokens},
        )
        shape = CacheShape(1, 1, 1, 4, torch.float32, torch.device("cpu"))
        rollouts = largest_microbatch(list(range(prompt)), config, shape, plain=True)
        assert len(rollouts[0].response) == max_tokens
        assert list(packs(rollouts, max(tokens, prompt + max_tokens), share_prompts=True)) == [list(range(len(rollouts)))]
        fed = len(pack_tokens(rollouts, share_prompts=True).tokens) + len(rollouts)  # last tokens are not fed
        assert tokens - prompt <= fed <= max(tokens, prompt + max_tokens)
        ranks = config.model_copy(update={"ranks": config.ranks.model_copy(update={"count": 2})})
        every_prompt = largest_microbatch(list(range(prompt)), ranks, shape, plain=True)
        assert not pack_tokens(every_prompt, share_prompts=True).shared


@pytest.mark.parametrize("policy", ["rkv", "full"])
def test_a_rehearsal_of_the_sampler_takes_all_slots_and_changes_nothing(tiny, policy):
    kv, prompt = KV(policy=policy, budget=24, interval=8, window=4, protect_prompt=False), [3, 4, 5, 6, 7]
    config = Config(rollout={"max_tokens": 40})
    sampling = config.rollout.sampling(1)
    tried, fresh = (Engine(tiny, kv, slots=3) for _ in range(2))
    done = try_sampler(tried, prompt, config)
    assert [len(rollout.response) for rollout in done] == 3 * [tried.chunk + 1]
    for left, right in zip(*(engine.generate([prompt], 4, sampling) for engine in (tried, fresh)), strict=True):
        assert left.response == right.response and torch.equal(left.logprobs, right.logprobs)
    assert tried.stats.tokens == fresh.stats.tokens
    preflight(None, tiny, None, prompt, config)  # nothing on a CPU


def test_the_clock_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert device_time(torch.device("cpu")) < device_time(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_a_sampler_that_keeps_everything_is_the_one_that_is_evaluated(world, tmp_path, monkeypatch):
    """Whatever its settings say of a budget: no second dense cache is made beside it."""
    made = []
    for module in (trainer, held_out):
        monkeypatch.setattr(module, "Engine", lambda *args, **options: made.append(Engine(*args, **options)) or made[-1])
    train(world, tmp_path / "run", "--kv.policy", "full", "--steps", "1", "--rollout.max-tokens", "4",
          "--eval.problems", "3", "--data.test", str(world / "problems.jsonl"))  # fmt: skip
    assert len(made) == 1 and any("pass@1" in key for row in metrics(tmp_path / "run") for key in row)


@pytest.mark.parametrize("method", ["smd", "on_policy_sparse"])
def test_the_samplers_own_view_is_the_dense_one_where_nothing_is_evicted(world, tmp_path, method):
    """A policy that never evicts records no trace, and needs none."""
    train(world, tmp_path / "run", "--method", method, "--kv.policy", "full", "--steps", "1")
    assert metrics(tmp_path / "run")[-1]["sparse/engine_noise"] < 1e-4


def test_a_held_out_task_is_graded_by_its_own_reward(tmp_path, monkeypatch):
    """Also where another task, with another reward, is trained on."""
    (tmp_path / "gsm8k-train.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n' * 2)
    opened = []
    monkeypatch.setattr(
        held_out, "pool_for", lambda reward, function, **more: opened.append(function) or pool_for(reward, function, **more)
    )
    flags = {"data.dir": tmp_path, "data.train": "gsm8k", "data.test": "arithmetic", "eval.problems": 2, "method": "dense",
             "rollout.max-tokens": 4, "rollout.prompts-per-step": 2, "rollout.samples-per-prompt": 2, "steps": 1,
             "reward.workers": 1, "run-dir": tmp_path / "run"}  # fmt: skip
    with one_thread():
        main(["train", *(text for key, value in flags.items() for text in (f"--{key}", str(value)))])
    assert opened == ["arithmetic", "arithmetic"]  # before and after
    assert metrics(tmp_path / "run")[0]["eval/arithmetic/no_verdict"] == 0


def test_evaluated_rollouts_without_a_verdict_are_counted(world, tmp_path, capsys):
    test = ["--data.test", str(world / "problems.jsonl"), "--eval.problems", "8", "--reward.timeout-s", "0.5"]
    train(world, tmp_path / "run", *test, "--steps", "1", reward="fails")
    before = metrics(tmp_path / "run")[0]
    assert before["eval/problems/no_verdict"] > 0
    assert "got no verdict" in capsys.readouterr().out


def test_a_reward_that_falls_silent_for_a_step_does_not_end_the_run(world, tmp_path, capsys):
    train(world, tmp_path / "run", "--steps", "3", "--checkpoint.every", "1", reward="silent_once")
    rows = metrics(tmp_path / "run")[1:]
    assert [row["reward/errors"] for row in rows] == [0, 4, 0]
    assert [row["reward/dropped_groups"] for row in rows] == [0, 2, 0]
    assert "reward/mean" not in rows[1] and rows[1]["policy/skipped_updates"] == 1
    assert "no group had two different rewards, so nothing is learned: 4 of 4 rollouts got no verdict." in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("timeout", "why"), [("zero", "the problems are too easy or too hard"), ("none", "1 of 2 rollouts got no verdict")]
)
def test_a_step_without_signal_is_not_blamed_on_timeouts_that_count_as_zero(timeout, why):
    warnings = []
    health = Health(Config(reward={"timeout": timeout}), State(step=1), None, warnings.append)
    rewards = [0.0, 0.0 if timeout == "zero" else None]
    samples = [Sample(row, None, None, reward) for row, reward in enumerate(rewards)]
    health.after_step(RolloutBatch([RolloutGroup(samples, equal_rewards=True)], counts=Counter(timeouts=1)), [])
    assert f"no group had two different rewards, so nothing is learned: {why}" in warnings[0]


def test_a_reward_is_told_how_a_rollout_ended_and_which_tokens_it_has(world, tmp_path):
    """In the try on a gold, in training and in the evaluation of held-out problems."""
    run, test = tmp_path / "run", ["--data.test", str(world / "problems.jsonl"), "--eval.problems", "2"]
    train(world, run, *test, "--method", "dense", "--steps", "1", "--rollout.max-tokens", "6", reward="tells_the_columns")
    lines = [line.removeprefix("columns ") for line in (run / "reward.log").read_text().splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("[")]
    tokenizer = load_tokenizer("tiny")
    assert len(told) == 1 + 4 + 2 * 2 and told[0] == ["1", "stop", tokenizer.encode("1", add_special_tokens=False)]
    for text, finish, ids in told[1:]:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert (finish == "stop") == (ids[-1] == tokenizer.eos_token_id) and len(ids) <= 6
    rollouts = pq.read_table(run / "rollouts/step-1.parquet").to_pylist()
    assert {each["text"] for each in rollouts} <= {text for text, _, _ in told}


@pytest.mark.parametrize(("truncated", "reward"), [("zero", 0.0), ("none", None)])
def test_cut_off_answers_earn_nothing_unless_the_reward_is_asked(world, tmp_path, capsys, truncated, reward):
    """The default is zero. A step in which all are cut off is told of, and is not the end of the run."""
    run = tmp_path / "run"
    train(world, run, "--method", "dense", "--steps", "1", "--rollout.max-tokens", "3", "--reward.truncated", truncated)
    rollouts = pq.read_table(run / "rollouts/step-1.parquet").to_pylist()
    assert {each["finish"] for each in rollouts} == {"length"} and {each["reward"] for each in rollouts} == {reward}
    assert "4 of 4 rollouts were truncated and not graded; raise rollout.max_tokens" in capsys.readouterr().out


def test_answers_that_are_cut_off_can_be_left_out(world, tmp_path, monkeypatch, capsys):
    """They teach nothing, and count in their group's mean all the same. This model seldom ends, so a limit of 2 cuts all off."""
    batches = []
    monkeypatch.setattr(
        training_step,
        "make_one_pass_batch",
        lambda rollouts, *rest, **more: batches.append((rollouts, rest[0])) or make_one_pass_batch(rollouts, *rest, **more),
    )
    flags = ["--steps", "1", "--rollout.samples-per-prompt", "8", "--rollout.temperature", "3"]
    train(world, tmp_path / "all", *flags)
    train(world, tmp_path / "ended", *flags, "--advantage.mask-truncated", "true")
    (every, advantages), (ended, kept) = batches
    whole = [rollout.finish != "length" for rollout in every]
    assert [rollout.response for rollout in ended] == [r.response for r, stays in zip(every, whole, strict=True) if stays]
    assert 0 < len(ended) < len(every) and kept.tolist() == advantages[whole].tolist()
    capsys.readouterr()
    train(world, tmp_path / "none", *flags, "--rollout.max-tokens", "2", "--advantage.mask-truncated", "true")
    assert len(batches) == 2 and metrics(tmp_path / "none")[-1]["policy/skipped_updates"] == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Step 1: every answer with a signal was truncated, so nothing is learned: advantage.mask_truncated excludes" in said


def test_an_evaluation_that_fails_costs_no_step(world, tmp_path, monkeypatch, capsys):
    """The last one, say, for which there is no memory left: what was trained is saved, and --resume writes the model."""
    test = ["--data.test", str(world / "problems.jsonl"), "--eval.problems", "2"]
    train(world, tmp_path / "whole", *test)
    scored = []

    def score_once(*args):
        scored.append(args)
        if len(scored) > 2:  # before training, with either cache
            raise torch.OutOfMemoryError("no memory for the cache")
        return loop_score(*args)

    loop_score = held_out.score
    monkeypatch.setattr(held_out, "score", score_once)
    with pytest.raises(SystemExit):
        train(world, tmp_path / "run", *test)
    assert "The evaluation failed. Step 2 is saved" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run/model").exists()
    train(world, tmp_path / "run", *test, "--resume")
    whole, again = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]


def test_where_nothing_can_be_saved_the_evaluations_own_error_is_told(world, tmp_path, monkeypatch, capsys):
    before_training = iter([{}])

    def evaluate(evaluator):
        for found in before_training:
            return found
        raise UserError("The judge is down: start it.")

    def save(*args):
        raise UserError("The disk is full: free some disk space.")

    monkeypatch.setattr(held_out.Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(trainer.checkpoint, "save", save)
    with pytest.raises(SystemExit):
        train(world, tmp_path / "run")
    told = " ".join(capsys.readouterr())
    assert "The judge is down" in told and "is saved" not in told


def test_a_logger_that_fails_does_not_end_the_run(world, tmp_path, monkeypatch, capsys):
    def log(self, step, metrics):
        raise ConnectionError("the network is unreachable")

    monkeypatch.setattr(loggers.TensorBoard, "log", log)
    train(world, tmp_path / "run", "--log.to", '["tensorboard"]')
    assert metrics(tmp_path / "run")[-1]["step"] == 2 and (tmp_path / "run/checkpoints/step-2").is_dir()
    said = " ".join(capsys.readouterr().out.split())
    assert "TensorBoard did not log the metrics of step 1 (ConnectionError: the network is unreachable)." in said


def test_a_logger_that_cannot_start_is_named(world, tmp_path, monkeypatch, capsys):
    def init(**options):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__name__="wandb", init=init))
    with pytest.raises(UserError) as error, loggers.opened_loggers(tmp_path, Config(log={"to": ["wandb"]}), 1):
        pass
    assert not is_final(error.value)  # its service may answer after a restart
    sentence = refused(capsys, *arguments(world, tmp_path / "run", "--log.to", "wandb"))
    assert "log.to = wandb could not start (RuntimeError: No API key configured. Use `wandb login` to log in)" in sentence


def test_prompts_that_fill_the_budget_are_told_what_protects_them():
    kv, half = KV(policy="rkv", budget=100, protect_prompt=False), [[0] * 40, [0] * 60, [0] * 90]
    told = kv.remark(half, 500)
    assert "A typical prompt fills 60% of kv.budget = 100" in told
    assert "set kv.protect_prompt = true, with which kv.budget counts response tokens alone" in told
    assert "1 of 2 prompts is longer" in kv.remark([[0], [0] * 101], 500)
    assert kv.remark([[0] * 40, [0] * 50, [0] * 90], 500) is kv.remark([], 500) is None
    protected = KV(policy="rkv", budget=100, interval=1, protect_prompt=True)
    assert protected.remark(half, 103) is None
    assert "kv.budget = 100 never evicts: a response has at most 100 tokens." in protected.remark(half, 100)


def test_an_interval_that_leaves_no_compaction_is_told():
    """The last compaction of a response of 129 tokens finds 96 tokens, and a shorter response has none."""
    kv = KV(policy="rkv", budget=100, interval=32, protect_prompt=True)
    told = "kv.budget = 100 with kv.interval = 32 never evicts: a response has at most 96 tokens at the last compaction."
    assert kv.remark([[0]], 129).startswith(told) and kv.remark([[0]], 130) is None
    whole = kv.changed(interval=128)
    assert "never evicts: a response of 129 tokens ends before the first compaction." in whole.remark([[0]], 129)
    evictable = whole.changed(protect_prompt=False)
    assert (
        evictable.remark([[0] * 101], 128).startswith("1 of 1 prompt is longer") and evictable.remark([[0] * 5], 130) is None
    )


def test_a_budget_that_is_never_filled_is_told(world, tmp_path, capsys):
    for last in ([], ["--dry-run"]):
        train(world, tmp_path / "run", "--kv.budget", "64", "--kv.interval", "16", "--overwrite", *last)
        said = " ".join(capsys.readouterr().out.split())
        assert "kv.budget = 64 never evicts: a prompt and its response have at most " in said
        assert "Each slot still allocates 80 tokens." in said
    train(world, tmp_path / "run", "--method", "dense", "--kv.budget", "64", "--overwrite", "--dry-run")
    assert "never evicts" not in capsys.readouterr().out


def test_wandb_gets_every_metric_under_the_runs_own_id(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(world, tmp_path / "run", "--log.to", '["wandb"]')
    run_id = (tmp_path / "run" / "run-id").read_text()
    (record,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    written = record.read_bytes()
    for key in metrics(tmp_path / "run")[-1]:
        assert key == "step" or key.encode() in written


def test_a_score_without_an_interval_is_shown_alone():
    """One held-out problem with a reward of its own scale has none."""
    assert score_text(0.5, 0.4, 0.6, share=True) == "50.0% [40.0%, 60.0%]"
    assert score_text(2.5, 2.0, 3.0, share=False) == "2.5 [2, 3]"
    assert score_text(2.5, None, None, share=False) == score_text(2.5, math.nan, math.nan, share=False) == "2.5"
