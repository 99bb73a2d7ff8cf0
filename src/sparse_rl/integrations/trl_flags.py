"""Flags of `trl grpo` by name: the option that carries each over, or the reason why none does. Imports neither TRL nor torch."""

import re

COUNTERPARTS = {
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "bf16": "model.dtype",
    "use_cpu": "model.device",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.targets",
    "use_peft": "model.lora.rank",
    "dataset_name": "data.train",
    "dataset_config": "data.train",
    "dataset_train_split": "data.train",
    "dataset_test_split": "data.test",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "max_prompt_length": "data.max_prompt_tokens",
    "reward_funcs": "reward.function",
    "reward_weights": "reward.function",
    "num_generations": "rollout.samples_per_prompt",
    "generation_batch_size": "rollout.prompts_per_step",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "rollout.prompts_per_step",
    "steps_per_generation": "optimizer.updates_per_step",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "loss_type": "loss.name",
    "importance_sampling_level": "loss.name",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "beta": "loss.kl_coef",
    "use_bias_correction_kl": "loss.kl_estimator",
    "entropy_coef": "loss.entropy_coef",
    "scale_rewards": "advantage.std",
    "mask_truncated_completions": "advantage.mask_truncated",
    "off_policy_mask_threshold": "correction.opsm",
    "learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "weight_decay": "optimizer.weight_decay",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_checkpointing": "optimizer.gradient_checkpointing",
    "max_steps": "steps",
    "output_dir": "run_dir",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
    "report_to": "log.to",
}
"""Option of sparse-rl that has the meaning of a TRL flag, alone or together with others. `seed` has the same name."""

REASONS = {
    r"top_p|top_k|min_p|repetition_penalty|generation_kwargs": (
        "rollouts are sampled from the whole softmax, because the correction is exact only there"
    ),
    r"num_iterations": "every rollout is used for one update",
    r"vllm_importance_sampling_\w+": "the correction of method = sparse_rl takes its place (correction.preset)",
    r"use_vllm|vllm_\w+|use_transformers_\w+|transformers_continuous_\w+|cache_implementation|ds3_gather_for_generation": (
        "the built-in engine samples"
    ),
    r"delta|top_entropy_quantile|sapo_\w+|vespo_\w+|use_adaptive_entropy|entropy_coef_\w+|entropy_target": (
        "no loss of sparse-rl has it"
    ),
    r"multi_objective_aggregation": "rewards are added before they are normalised",
    r"sync_ref_model|ref_model_\w+": "the reference is always the base model",
    r"reward_model_name_or_path": "a reward model is a function here, as in examples/reward_model.py",
    r"max_tool_calling_iterations": "rollouts have one turn",
    r"datasets|streaming|dataset_streaming|test_split_size": "a run reads one source: write the mixture to a JSON Lines file",
    r"shuffle_dataset|train_sampling_strategy|data_seed": "problems are always shuffled, by the seed of the run",
    r"model_revision": "download the revision and set model.path to its folder",
    r"model_init_kwargs": "set model.dtype and model.trust_remote_code instead",
    r"lora_dropout|use_dora|use_rslora|lora_modules_to_save|lora_target_parameters|lora_task_type": (
        "adapters are plain LoRA without dropout"
    ),
    r"load_in_\w+|bnb_\w+|use_bnb_\w+": "set model.lora.base = 4bit for NF4 base weights under LoRA; kv.dtype quantises the cache",
    r"router_aux_loss_coef": "the loss has no term for routers",
    r"optim|optim_\w+|adam_epsilon": "the optimizer is AdamW with epsilon 1e-8; optimizer.state sets its memory",
    r"lr_scheduler_kwargs": "schedules have no other options",
    r"fp16|fp16_full_eval|bf16_full_eval": "models compute in bfloat16 or float32 (model.dtype)",
    r"fsdp\w*|deepspeed|ddp_\w+|parallelism_config|accelerator_config|local_rank|average_tokens_across_devices": (
        "start one process per GPU with torchrun; the learner is sharded"
    ),
    r"push_to_hub|hub_\w+": "push after training: sparse-rl export RUN --push REPO",
    r"resume_from_checkpoint": "add --resume to sparse-rl train",
    r"log\w*|disable_tqdm|run_name|project|trackio_\w+|num_completions_to_print|include_num_input_tokens_seen": (
        "every step goes to metrics.jsonl, its rollouts to rollouts/ and both to the report"
    ),
    r"eval_\w+|per_device_eval_batch_size|num_generations_eval|do_eval|load_best_model_at_end|metric_for_best_model|"
    r"greater_is_better": "[eval] and checkpoint.best set the evaluation, with one rollout per problem",
    r"save_\w+|enable_jit_checkpoint": "checkpoints are saved by steps and hold the optimizer",
    r"dataloader_\w+|remove_unused_columns|ignore_data_skip|length_column_name|label_names": (
        "problems are read once, before training, with all their columns"
    ),
    r"attn_implementation|use_liger_kernel|liger_kernel_config|torch_compile\w*|use_cache|gradient_checkpointing_kwargs|tf32|"
    r"pad_to_multiple_of|torch_empty_cache_steps|cast_lm_head_to_fp32|auto_find_batch_size": (
        "sparse-rl chooses its kernels, packing and memory itself"
    ),
}
"""Why a flag has no counterpart, by a pattern of names. The converter says so unless the flag has TRL's default."""


def reason(name: str) -> str | None:
    """Return why a flag has no counterpart, or None if no pattern has its name."""
    return next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, name)), None)


def hint(flag: str) -> str | None:
    """Return a sentence about a flag of TRL that was passed to `sparse-rl train`, or None if TRL has no such flag."""
    name = flag.lstrip("-").split("=")[0].replace("-", "_")
    if option := COUNTERPARTS.get(name):
        return (
            f"--{name} is a flag of TRL: sparse-rl calls this --{option.replace('_', '-')} (sparse-rl from-trl converts all)."
        )
    if why := reason(name):
        return f"--{name} is a flag of TRL and has no counterpart: {why}."
    return None
