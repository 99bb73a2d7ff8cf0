"""Convert the flags of `trl grpo` to a recipe. Every flag is converted, or a note says why not.

`COUNTERPARTS` and `REASONS` in `trl_flags.py` list the flags. This module computes the values, also of flags with TRL's default.
"""

import math
from typing import Any

from ..config import Config
from ..errors import UserError
from ..format import counted
from .trl_flags import reason
from .trl_parser import Flags, parsed
from .trl_problems import OVERLONG, data_section, reward_section
from .trl_version import require_trl

AGGREGATES = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}
"""Losses of TRL that are GRPO's clipped surrogate with another mean: `loss.aggregate` of each."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
LOGGERS = ("tensorboard", "wandb", "trackio")


def convert(arguments: list[str]) -> tuple[str, list[str]]:
    """Return (the recipe as TOML, notes about differences). `arguments` are those of `trl grpo`, with or without that name."""
    import tomli_w

    version = require_trl("sparse-rl from-trl")
    flags = Flags(*parsed(arguments, version))
    values = recipe_values(flags)
    Config(**values)  # raises for values that no run accepts
    comments = [f"From the flags of trl grpo, TRL {version}.", *flags.notes]
    return "".join(f"# {each}\n" for each in comments) + "\n" + tomli_w.dumps(values), flags.notes


# Sections of the recipe


def recipe_values(flags: Flags) -> dict[str, Any]:
    """Return the values of the recipe, and complete `flags.notes`."""
    rollout, updates = _batch(flags)
    max_tokens, trl_updates = rollout["max_tokens"], updates * flags["num_iterations"]
    if flags["max_steps"] > 0:
        steps = {"steps": math.ceil(flags["max_steps"] / trl_updates)}
        flags["num_train_epochs"]  # reading it counts as converted
    else:
        steps = {}
        flags.note(
            "num_train_epochs",
            f"steps is not set: set it to {flags['num_train_epochs']:g} * training prompts / {rollout['prompts_per_step']}",
        )
    budget = max(64, 16 * (max_tokens // 32))
    flags.notes.insert(
        0,
        f"TRL samples with a dense cache, as method = dense does. The recipe bounds it to kv.budget = {budget} tokens"
        + (", half of --max_completion_length." if 2 * budget <= max_tokens + 32 else "."),
    )
    values: dict[str, Any] = {
        "method": "sparse_rl",
        "seed": flags["seed"],
        **steps,
        **({"run_dir": flags["output_dir"]} if flags["output_dir"] else {}),
        "model": _model(flags),
        "kv": {"budget": budget, "interval": min(128, budget // 4)},
        "rollout": rollout,
        "loss": _loss(flags),
        "advantage": _advantage(flags),
        "optimizer": _optimizer(flags, updates, trl_updates),
        "reward": reward_section(flags, max_tokens),
        "data": data_section(flags),
        "eval": _evaluation(flags, trl_updates),
        "checkpoint": _checkpoint(flags, trl_updates),
        "log": _log(flags),
    }
    if flags["off_policy_mask_threshold"] is not None:
        values["correction"] = {"opsm": flags["off_policy_mask_threshold"]}
    if values["reward"].pop("overlong", None):
        values["advantage"]["overlong"] = OVERLONG[2]
    flags.finish()
    return {key: value for key, value in values.items() if value != {}}


def _batch(flags: Flags) -> tuple[dict[str, Any], int]:
    """Return (the section rollout, updates per step).

    TRL generates generation_batch_size = per_device * processes * steps_per_generation sequences at once, and updates after
    per_device * processes * gradient_accumulation_steps. All sequences between two updates come from the same weights, so a step
    is the larger of the two.
    """
    samples, accumulated, every = flags["num_generations"], flags["gradient_accumulation_steps"], flags["steps_per_generation"]
    at_once = flags["per_device_train_batch_size"] * flags["num_processes"]
    generated, per_update = flags["generation_batch_size"] or at_once * (every or accumulated), at_once * accumulated
    whole = max(generated, per_update)
    if generated % samples:
        raise UserError(
            f"TRL generates {counted(generated, 'sequence')} at once, which is not a multiple of --num_generations "
            f"{samples}: change one."
        )
    if whole % generated or whole % per_update:
        raise UserError(
            f"TRL generates {counted(generated, 'sequence')} at once and uses {per_update} per update, which "
            "sparse-rl does not mix: let one be a multiple of the other."
        )
    prompts, updates = whole // samples, whole // per_update
    if flags["max_completion_length"] is None:
        raise UserError("max_completion_length is null, and sparse-rl needs a limit: pass --max_completion_length 512.")
    if "num_processes" not in flags.given:
        flags.notes.append("The batch is that of one process: add --num_processes N if TRL ran on N GPUs.")
    if flags["num_iterations"] > 1:
        flags.note("num_iterations", f"not carried over, {reason('num_iterations')}")
    if updates > prompts:
        name = "steps_per_generation" if every else "generation_batch_size"
        flags.note(name, f"{updates} updates would split a group of {samples}, so optimizer.updates_per_step is {prompts}")
    rollout = {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "max_tokens": flags["max_completion_length"],
        "temperature": flags["temperature"],
    }
    return rollout, min(updates, prompts)


def _model(flags: Flags) -> dict[str, Any]:
    if not flags["model_name_or_path"]:
        raise UserError("The flags name no model: add --model_name_or_path.")
    model: dict[str, Any] = {"path": flags["model_name_or_path"]}
    if flags["trust_remote_code"]:
        model["trust_remote_code"] = True
    if flags["bf16"] is False and not flags.given.get("fp16"):
        model["dtype"] = "float32"
    if flags["use_cpu"]:
        model["device"] = "cpu"
    if flags["dtype"] not in ("float32", "auto"):
        flags.note("dtype", "model.dtype is bfloat16 on a GPU, and master weights are always float32")
    if flags["use_peft"]:
        targets = flags["lora_target_modules"]
        if targets is None:
            flags.note("lora_target_modules", "wrote q_proj,v_proj, peft's choice for Llama, Mistral, Gemma and Qwen")
        model["lora"] = {
            "rank": flags["lora_r"],
            "alpha": flags["lora_alpha"],
            "targets": ",".join(targets or ["q_proj", "v_proj"]),
        }
        if flags["lora_dropout"]:
            flags.note("lora_dropout", f"not carried over, {reason('lora_dropout')}")
    else:
        for name in set(flags.given) & {"lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"}:
            flags.note(name, "no effect without --use_peft, as in TRL")
    return model


def _loss(flags: Flags) -> dict[str, Any]:
    kind, low = flags["loss_type"], flags["epsilon"]
    high = low if flags["epsilon_high"] is None else flags["epsilon_high"]
    sequences = flags["importance_sampling_level"] == "sequence"
    if kind == "cispo" and not sequences:
        if high < 1:
            raise UserError(
                f"--loss_type cispo caps the ratio at --epsilon_high = {high:g}, below 1: pass --epsilon_high 5.0, as TRL advises."
            )
        loss = {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    elif kind in AGGREGATES:
        aggregate = AGGREGATES[kind]
        loss = {"name": "gspo" if sequences else "grpo", "aggregate": aggregate, "clip_low": low, "clip_high": high}
    else:
        raise UserError(
            f"--loss_type {kind}{' with sequence ratios' if sequences else ''} has no counterpart: use one of "
            f"{', '.join((*AGGREGATES, 'cispo'))}, or keep TRL's trainer with sparse_rl.integrations.trl."
        )
    if flags["beta"]:
        # rho * k3 has the gradient of k2 where the ratio rho is 1: -log(pi_ref / pi) grad log pi
        loss |= {"kl_coef": flags["beta"], "kl_estimator": "k2" if flags["use_bias_correction_kl"] else "k3"}
        if flags["use_bias_correction_kl"]:
            flags.note(
                "use_bias_correction_kl", "wrote loss.kl_estimator = k2, which has its gradient in the first update of a batch"
            )
    if flags["entropy_coef"]:
        loss["entropy_coef"] = flags["entropy_coef"]
        if loss.get("aggregate") in ("sequence", "constant"):
            flags.note("entropy_coef", "the bonus is averaged like the loss, TRL's over tokens")
    return loss


def _advantage(flags: Flags) -> dict[str, Any]:
    scale = {True: "group", False: "none"}.get(flags["scale_rewards"], str(flags["scale_rewards"]).lower())
    scale = {"true": "group", "false": "none"}.get(scale, scale)
    if scale == "batch":
        flags.note("scale_rewards", "wrote advantage.std = true, the deviation of the group: that of the batch is not offered")
    advantage = {"std": scale != "none"}
    return advantage | ({"mask_truncated": True} if flags["mask_truncated_completions"] else {})


def _optimizer(flags: Flags, updates: int, trl_updates: int) -> dict[str, Any]:
    schedule = str(getattr(flags["lr_scheduler_type"], "value", flags["lr_scheduler_type"]))
    if schedule not in SCHEDULES:
        raise UserError(f"--lr_scheduler_type {schedule} has no counterpart: use one of {', '.join(SCHEDULES)}.")
    warmup = 0 if schedule == "constant" else flags["warmup_steps"]
    if 0 < warmup < 1:
        if flags["max_steps"] <= 0:
            flags.note("warmup_steps", "not carried over, a share needs --max_steps: set optimizer.warmup_steps")
        warmup *= max(0, flags["max_steps"])
    optimizer: dict[str, Any] = {
        "lr": flags["learning_rate"],
        "betas": [flags["adam_beta1"], flags["adam_beta2"]],
        "weight_decay": flags["weight_decay"],
        "schedule": SCHEDULES[schedule],
        "warmup_steps": math.ceil(warmup / trl_updates),
        "updates_per_step": updates,
    }
    if flags["max_grad_norm"]:
        optimizer["clip_norm"] = flags["max_grad_norm"]
    else:
        flags.note("max_grad_norm", "gradients are always clipped; optimizer.clip_norm = 1e6 in effect disables it")
        optimizer["clip_norm"] = 1e6
    if "gradient_checkpointing" in flags.given:
        optimizer["gradient_checkpointing"] = flags["gradient_checkpointing"]
    return optimizer


def _evaluation(flags: Flags, updates: int) -> dict[str, Any]:
    if flags["eval_strategy"] == "no":
        return {}
    if flags["eval_strategy"] != "steps":
        flags.note("eval_strategy", "held-out problems are evaluated before and after training: set eval.every for more")
        return {}
    name = "eval_steps" if flags["eval_steps"] else "logging_steps"
    return _every(flags, name, updates)


def _checkpoint(flags: Flags, updates: int) -> dict[str, Any]:
    if flags["save_strategy"] != "steps":
        flags.note("save_strategy", "checkpoint.every has its default, and the last step is always saved")
        return {}
    if flags["save_total_limit"] is None:
        flags.note("save_total_limit", "TRL keeps all checkpoints; checkpoint.keep has its default")
        return _every(flags, "save_steps", updates)
    return _every(flags, "save_steps", updates) | {"keep": max(1, flags["save_total_limit"])}


def _every(flags: Flags, name: str, updates: int) -> dict[str, int]:
    """Return an interval in steps. TRL counts updates, or below 1 a share of all updates."""
    if flags[name] < 1 and flags["max_steps"] <= 0:
        flags.note(name, "not carried over, a share needs --max_steps")
        return {}
    count = flags[name] * flags["max_steps"] if flags[name] < 1 else flags[name]
    return {"every": max(1, round(count / updates))}


def _log(flags: Flags) -> dict[str, Any]:
    wanted = flags["report_to"]
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])
    known = [name for name in names if name in LOGGERS]
    if others := [name for name in names if name not in (*LOGGERS, "none", "all")]:
        flags.note("report_to", f"{', '.join(others)} is not offered: use {', '.join(LOGGERS)}")
    if "all" in names:
        flags.note("report_to", f"name the loggers in log.to: {', '.join(LOGGERS)}")
    return {"to": known} if known else {}
