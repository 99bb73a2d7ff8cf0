#!/usr/bin/env bash
# GRPO on GSM8K in verl 0.9.1, on one machine with 8 GPUs. docs/coming-from-verl.md has the recipe for sparse-rl.
# verl's own script of this kind: verl-project/verl, examples/grpo_trainer/run_qwen3_4b_fsdp.sh, commit 50ef5e4.
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.filter_overlong_prompts=True \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.train_batch_size=256 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    trainer.total_training_steps=200 \
    trainer.test_freq=10 \
    trainer.save_freq=50
