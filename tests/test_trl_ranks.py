"""TRL on several ranks: two of them make the step of one process. Models and launchers that the engine cannot read are refused."""

import functools

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)
from trl import GRPOConfig

from ranks import run_ranks
from small_runs import one_thread
from sparse_rl import KV, UserError, load_tokenizer
from sparse_rl.data.arithmetic import make_problems
from sparse_rl.integrations.trl import SparseGRPOTrainer, SparseRollouts
from sparse_rl.integrations.trl_rollouts import refuse_trainer
from sparse_rl.kernels.counter_rng import derive
from sparse_rl.models.load import TINY
from test_trl import DATASET, SMALL, TIGHT, by_text, trainer_of

STEP = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
"""Weights move by the gradient itself. Adam would enlarge the rounding of gradients that are almost 0."""
PREDICTED = KV(policy="triattention", budget=14, interval=4, window=4, sinks=2, protect_prompt=False)
"""A policy with statistics of queries, and so tight a cache that some completions are rejected."""
LONG_AND_SHORT = Dataset.from_dict({"prompt": [make_problems(1, 0, sums=sums)[0].prompt for sums in (4, 3)]})
SHARDED = "sharded over ranks .*use DDP or ZeRO-2, or sparse-rl train"


class SeedsOfTwoRanks(SparseRollouts):
    """Samples in one process what two ranks sample: the first half of the rows with the seeds of rank 0."""

    def _seeds(self, trainer, rollouts):
        half = rollouts // 2
        bases = [derive(trainer.args.seed, 1, trainer.state.global_step, 0, rank) for rank in range(2)]
        return [derive(bases[row // half], row % half) for row in range(rollouts)]


def one_step(folder, name, rollouts=None, **settings):
    """Train one step. Store the weights before and after it, the log, the length of the longest completion and the statistics."""
    args = GRPOConfig(str(folder), **(SMALL | STEP | settings))
    trainer = SparseGRPOTrainer(
        str(TINY), by_text, args, LONG_AND_SHORT, processing_class=load_tokenizer("tiny"), kv=PREDICTED
    )
    if rollouts is not None:
        trainer.rollouts = trainer.rollout_func = rollouts
    before = weights_of(trainer)
    trainer.train()
    longest = max(len(rollout.response) for rollout in trainer.rollouts.rollouts)
    statistics = trainer.rollouts.engine.statistics
    stored = (before, weights_of(trainer), trainer.state.log_history[0], longest, statistics)
    torch.save(stored, folder / f"{name}-{trainer.accelerator.process_index}.pt")


def weights_of(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


def test_two_ranks_make_the_step_of_one_process(tmp_path):
    """The same completions and statistics, on two ranks with a group each and in one process with both: each row has its own
    correction."""
    work = functools.partial(one_step, gradient_accumulation_steps=1, ddp_backend="gloo")
    for code, output in run_ranks(tmp_path, work, tmp_path, "two"):
        assert code == 0, output
    with one_thread():
        one_step(tmp_path, "one", SeedsOfTwoRanks(PREDICTED))
    (_, first, log, longest, mine), (_, second, _, other_longest, other) = (
        torch.load(tmp_path / f"two-{rank}.pt") for rank in range(2)
    )
    before, whole, whole_log, _, statistics = torch.load(tmp_path / "one-0.pt")
    assert torch.equal(first, second)
    assert float((whole - before).abs().max()) > 1e-2 and float((whole - first).abs().max()) < 1e-6
    assert longest != other_longest and 0 < log["sparse/rejection_rate"] < 1  # so that a wrong row or width shows
    for key in [key for key in whole_log if key.startswith(("sparse/", "reward"))]:
        assert log[key] == pytest.approx(whole_log[key], rel=1e-5), key
    assert "query_mean" in mine and all(torch.equal(mine[name], each) for name, each in other.items())
    torch.testing.assert_close(mine, statistics)


def test_weights_that_fsdp_shards_are_refused(tmp_path, monkeypatch):
    args = GRPOConfig(str(tmp_path), **SMALL)
    state = trainer_of(tmp_path).accelerator.state  # all trainers of a process share it
    monkeypatch.setattr(state, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2), raising=False)
    with pytest.raises(UserError, match=SHARDED):
        SparseGRPOTrainer(str(TINY), by_text, args, DATASET, processing_class=load_tokenizer("tiny"), kv=TIGHT)


def test_weights_that_zero_3_shards_are_refused_and_those_of_zero_2_are_not(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    state = trainer.accelerator.state
    monkeypatch.setattr(state, "distributed_type", DistributedType.DEEPSPEED)
    for stage in (2, 3):
        monkeypatch.setattr(state, "deepspeed_plugins", DeepSpeedPlugin(zero_stage=stage))
        trainer.is_deepspeed_enabled = state.deepspeed_plugin is not None  # as transformers sets it
        assert trainer.is_deepspeed_enabled
        if stage == 2:
            refuse_trainer(trainer)
    with pytest.raises(UserError, match=SHARDED):
        SparseRollouts(TIGHT).prepare(trainer)


def test_a_vision_model_is_refused_though_only_its_folder_is_named(tmp_path):
    """TRL loads the processor of the folder by itself."""
    tokenizer = load_tokenizer("tiny")
    small = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=8, image_size=8, patch_size=4, projection_dim=8, **small),
        text_config=Qwen2Config(vocab_size=len(tokenizer), hidden_size=8, num_key_value_heads=1, **small),
        image_token_index=tokenizer.pad_token_id,
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=4, image_token=tokenizer.pad_token).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="samples only text: use a text model"):
        SparseGRPOTrainer(str(tmp_path), by_text, GRPOConfig(str(tmp_path / "run"), **SMALL), DATASET, kv=TIGHT)
