"""`rollout.refill_rejected`: other samples replace rejected rollouts before the update, and nothing sampled leaves the metrics."""

from collections import Counter

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from small_runs import arguments, metrics, one_thread, refused, train, without_clock
from sparse_rl import replay
from sparse_rl.bench.synthetic import FIXED, synthetic_trainer
from sparse_rl.config import MAX_DRAWS, Config
from sparse_rl.learner.advantages import group_advantages

VETO = 0.6
"""Rejects about half of the rollouts of these models."""
REFILL = ["--rollout.refill-rejected", "true", "--correction.veto", str(VETO)]


@pytest.fixture
def trainer_of(world):
    """Open a trainer of the small model with random prompts; a reward that tells most answers apart."""
    opened = []

    def open_trainer(**sections):
        values = {
            "model": {"path": str(world / "model")},
            "kv": {"policy": "rkv", "budget": 20, "interval": 4, "window": 4, "protect_prompt": False},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 24, "refill_rejected": True},
            "correction": {"veto": VETO},
            "optimizer": {"lr": 1e-3},
            **FIXED,
            "reward": {**FIXED["reward"], "workers": 1},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        made = synthetic_trainer(Config(**values), Console(quiet=True), 6, uniform_lengths=False)
        opened.append(made)
        return made.__enter__()

    with one_thread():
        yield open_trainer
        for made in opened:
            made.__exit__(None, None, None)


@torch.no_grad()
def is_rejected(model, rollout) -> bool:
    """By the paper's rule, from a pass over this rollout alone."""
    (dense,) = replay(model, [rollout], "dense")
    return bool(((dense - rollout.logprobs).exp() < VETO).any())


def tokens_of(samples):
    return [sample.rollout.response for sample in samples]


def test_a_group_keeps_no_rejected_rollout_unless_the_last_round_rejects_it(trainer_of):
    trainer = trainer_of()
    batch = trainer.training_step.sample(0, None)
    plain = trainer_of(rollout={"refill_rejected": False}).training_step.sample(0, None)
    assert not plain.replaced and tokens_of(batch.samples[:16]) == tokens_of(plain.samples)  # the first round is the same
    assert [sample.row for sample in batch.samples] == list(range(16 + len(batch.replaced)))
    assert len(batch.replaced) > 3 and all(is_rejected(trainer.actor.learner, each.rollout) for each in batch.replaced)
    assert not any(each.in_loss or each.advantage for each in batch.replaced)
    seeds = [sample.rollout.seed for sample in batch.samples]
    assert len(set(seeds)) == len(seeds) and len(set(map(tuple, tokens_of(batch.samples)))) == len(seeds)
    tried = Counter(tuple(each.rollout.prompt) for each in batch.replaced)
    still = 0
    for group, before in zip(batch.groups, plain.groups, strict=True):
        assert len(group.samples) == 4 and {tuple(each.rollout.prompt) for each in group.samples} == {
            tuple(before.samples[0].rollout.prompt)
        }
        kept = [place for place in range(4) if group.samples[place].row == before.samples[place].row]
        rejected = [place for place in range(4) if is_rejected(trainer.actor.learner, group.samples[place].rollout)]
        assert not set(kept) & set(rejected)
        assert tried[tuple(group.samples[0].rollout.prompt)] >= (MAX_DRAWS - 1) * len(rejected) + 4 - len(kept) - len(rejected)
        still += len(rejected)
        rewards = torch.tensor([[each.reward for each in group.samples]], dtype=torch.float64)
        expected = group_advantages(rewards).advantages[0].tolist()
        assert [each.advantage for each in group.samples] == pytest.approx(expected)
    assert still < sum(is_rejected(trainer.actor.learner, each.rollout) for each in plain.samples)
    result = trainer.training_step.learn(0, batch)
    row = trainer.training_step.metrics(0, result, 1.0)
    assert row["sparse/replaced"] == len(batch.replaced)
    assert row["sparse/rejection_rate"] == pytest.approx((len(batch.replaced) + still) / len(batch.samples))
    assert row["reward/mean"] == pytest.approx(sum(each.reward for each in batch.samples) / len(batch.samples))


def test_the_update_uses_the_log_probs_that_decided(trainer_of):
    """No row runs twice: of those known from sampling none runs again in front of the update."""
    trainer = trainer_of(optimizer={"updates_per_step": 2})
    batch = trainer.training_step.sample(0, None)
    known = {row: logprobs for row, (logprobs, _) in batch.old_logprobs.items()}
    assert {sample.row for sample in batch.replaced} < set(known)
    result = trainer.training_step.learn(0, batch)
    assert all(result.old.dense[row] is each for row, each in known.items())
    assert set(result.row_weights.values()) == {1.0} and len(result.row_weights) == len(batch.samples)
    assert [each.learned for each in result.updates] == [True, True]


def test_groups_without_a_signal_are_refilled_after_rejected_rollouts(trainer_of):
    trainer = trainer_of(rollout={"refill": True, "prompts_per_step": 6, "samples_per_prompt": 2})
    batch = trainer.training_step.sample(0, None)
    assert len(batch.groups) > 6 and batch.replaced  # two answers have the same parity in every second group
    assert [sample.row for sample in batch.samples] == list(range(len(batch.samples)))
    assert len(batch.samples) == 2 * len(batch.groups) + len(batch.replaced)
    assert {sample.row for sample in batch.samples} == set(trainer.training_step.learn(0, batch).row_weights)


def test_adapters_merged_in_place_sample_again_from_merged_weights(trainer_of):
    trainer = trainer_of(model={"lora": {"rank": 4, "merge": False}}, optimizer={"lr": 0.05})
    for _ in range(2):
        row = trainer.step()
        assert row["sparse/replaced"] > 0 and row["sparse/engine_noise"] < 1e-4
    batch = trainer.training_step.sample(trainer.state.cursor, None)
    assert batch.replaced and trainer.actor.is_merged
    merged = trainer.actor.sampler
    for sample in batch.samples[16:]:  # before the first compaction the sampler sees every key
        (dense,) = replay(merged, [sample.rollout], "dense")
        torch.testing.assert_close(dense[:10], sample.rollout.logprobs[:10], atol=1e-4, rtol=0)


def test_a_killed_run_goes_on_to_the_bit(world, tmp_path):
    flags = [*REFILL, "--rollout.samples-per-prompt", "4", "--checkpoint.every", "1"]
    train(world, tmp_path / "whole", *flags, "--steps", "4")
    train(world, tmp_path / "cut", *flags, "--steps", "2")
    train(world, tmp_path / "cut", *flags, "--steps", "4", "--resume")
    whole, cut = (load_file(next((tmp_path / run / "model").glob("*.safetensors"))) for run in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    rows = without_clock(metrics(tmp_path / "whole"))
    assert rows == without_clock(metrics(tmp_path / "cut")) and sum(row.get("sparse/replaced", 0) for row in rows) > 0


def test_a_comparison_replaces_only_where_the_correction_rejects(world, tmp_path):
    train(world, tmp_path / "both", "--compare", '["naive", "sparse_rl"]', "--steps", "1", *REFILL)
    keys = [metrics(tmp_path / "both" / method)[-1].keys() for method in ("naive", "sparse_rl")]
    assert ["sparse/replaced" in each for each in keys] == [False, True]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--method", "naive"], "method = naive and correction.preset = none, which reject no sequence: remove it, or set"),
        (["--method", "smd"], "method = smd and correction.preset = none, which reject no sequence: remove it."),
        (
            ["--correction.preset", "tis"],
            "method = sparse_rl and correction.preset = tis, which reject no sequence: remove it,",
        ),
        (["--correction.preset", "paper", "--correction.veto", "0"], "which reject no sequence: remove it, or set"),
    ],
)
def test_a_method_that_rejects_nothing_is_refused(world, tmp_path, capsys, flags, sentence):
    told = refused(capsys, *arguments(world, tmp_path / "run", "--rollout.refill-rejected", "true", *flags))
    assert "rollout.refill_rejected = true has no effect with " in told and sentence in told
    assert not (tmp_path / "run").exists()
