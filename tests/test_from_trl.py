"""Flags of TRL become a recipe with the same meaning, and none is dropped without a word; checked against the real package."""

import runpy
import shutil
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts import grpo
from trl.scripts.grpo import GRPOScriptArguments

from small_runs import metrics, refused
from sparse_rl import UserError
from sparse_rl.cli import build_parser, main
from sparse_rl.config import Config, OptimizerConfig
from sparse_rl.integrations import from_trl
from sparse_rl.integrations.trl_flags import COUNTERPARTS, reason
from sparse_rl.integrations.trl_parser import Flags, parsed
from sparse_rl.learner.losses.regularizers import kl
from sparse_rl.learner.optimizer import Optimizer
from sparse_rl.models.load import TINY

EXAMPLE = Path(__file__).parents[1] / "examples/from_trl"
BASE = [
    "--model_name_or_path",
    "me/model",
    "--dataset_name",
    "me/data",
    "--reward_funcs",
    "my_lib.rewards.right",
    "--max_steps",
    "8",
]
FIELDS = {
    field.name: field
    for kind in (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    for field in fields(kind)
}


def convert(*flags):
    """(values of the recipe, notes)."""
    text, notes = from_trl.convert([*BASE, *flags])
    assert all(f"# {note}\n" in text for note in notes)
    return tomllib.loads(text), notes


# No flag is dropped


def test_every_flag_of_trl_has_a_counterpart_or_a_reason():
    known = {*COUNTERPARTS, "seed", "num_train_epochs", "do_train", "do_predict"}
    unnamed = {name for name, field in FIELDS.items() if field.init and name not in known and not reason(name)}
    # debug and rarely used flags, for which "sparse-rl has no such option" is the whole reason
    assert unnamed == {
        "batch_eval_metrics", "debug", "disable_dropout", "full_determinism", "ignore_bias_buffers", "include_for_metrics",
        "label_smoothing_factor", "neftune_noise_alpha", "prediction_loss_only", "restore_callback_states_from_checkpoint",
        "skip_memory_metrics",
    }  # fmt: skip
    assert set(COUNTERPARTS) - set(FIELDS) == {"max_prompt_length"}, "a flag of earlier versions"


def test_every_counterpart_is_an_option_of_train():
    flags = build_parser()._subparsers._group_actions[0].choices["train"]._option_string_actions
    assert {option for option in COUNTERPARTS.values() if f"--{option}" not in flags} == set()


def other_value(name, default):
    """A value that is not the default, of the type that TRL's parser gives."""
    special = {
        "report_to": ["mlflow"], "lr_scheduler_type": "cosine", "loss_type": "grpo", "scale_rewards": "none", "epsilon_high": 0.3,
        "importance_sampling_level": "sequence", "eval_strategy": "steps", "save_strategy": "no", "reward_weights": [0.5],
        "reward_funcs": ["a.b"], "dataset_name": "me/other", "chat_template_kwargs": {"a": 1}, "lora_target_modules": ["k_proj"],
        "off_policy_mask_threshold": 0.5, "generation_batch_size": 16, "steps_per_generation": 2, "save_total_limit": 3,
        "dtype": "bfloat16", "bf16": False, "num_generations": 4, "per_device_train_batch_size": 16, "warmup_steps": 2,
        "temperature": 0.5, "eval_steps": 5, "adam_beta1": 0.8, "adam_beta2": 0.9, "epsilon": 0.1,
    }  # fmt: skip
    if name in special:
        return special[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return "x" if default is None or isinstance(default, str) else ["x"]


@pytest.fixture(scope="module")
def base():
    return parsed(BASE, "1.16")


NEEDS = {
    "lora_r": {"use_peft": True}, "lora_alpha": {"use_peft": True}, "lora_target_modules": {"use_peft": True},
    "lora_dropout": {"use_peft": True}, "dataset_test_split": {"eval_strategy": "steps"}, "eval_steps": {"eval_strategy": "steps"},
}  # fmt: skip


@pytest.mark.parametrize("context", ["alone", "with the flag it needs"])
def test_no_flag_is_dropped_without_a_word(base, context):
    given, defaults = base
    for name, field in FIELDS.items():
        if not field.init or name in ("do_train", "do_predict", "max_steps", "num_train_epochs"):
            continue
        around = given | (NEEDS.get(name, {}) if context != "alone" else {})
        before = from_trl.recipe_values(Flags(around, defaults))
        flags = Flags(around | {name: other_value(name, defaults[name])}, defaults)
        after = from_trl.recipe_values(flags)
        assert after != before or any(f"--{name}" in note for note in flags.notes), name


def test_a_flag_at_the_default_of_trl_is_named(base):
    _, notes = convert("--top_p", "1.0", "--use_vllm", "false")
    assert "--top_p, --use_vllm: TRL's default, nothing to carry over." in notes


# The meaning


@pytest.mark.parametrize(
    ("batch", "processes", "prompts", "updates"),
    [
        ({"per_device_train_batch_size": 8}, 1, 1, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, 1, 4, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, 4, 16, 1),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 1, 8, 4),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "generation_batch_size": 64}, 2, 8, 1),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 1}, 1, 4, 1),
    ],
)
def test_a_step_has_the_sequences_that_trl_samples_from_the_same_weights(
    batch, processes, prompts, updates, tmp_path, monkeypatch
):
    words = [word for name, value in batch.items() for word in (f"--{name}", str(value))]
    values, _ = convert(*words, "--num_processes", str(processes))
    rollout = values["rollout"]
    assert (rollout["prompts_per_step"], values["optimizer"]["updates_per_step"]) == (prompts, updates)
    assert values["steps"] == 8 // updates
    # TRL's own arithmetic, for as many processes
    monkeypatch.setattr(GRPOConfig, "world_size", processes, raising=False)
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, **batch)
    per_update = args.per_device_train_batch_size * processes * args.gradient_accumulation_steps
    assert prompts * rollout["samples_per_prompt"] == max(args.generation_batch_size, per_update)
    assert updates == max(1, args.generation_batch_size // per_update)


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        ([], {"name": "grpo", "aggregate": "token", "clip_low": 0.2, "clip_high": 0.2}),  # TRL's default is dapo, without 0.28
        (
            ["--loss_type", "grpo", "--epsilon_high", "0.28"],
            {"name": "grpo", "aggregate": "sequence", "clip_low": 0.2, "clip_high": 0.28},
        ),
        (["--loss_type", "dr_grpo"], {"name": "grpo", "aggregate": "constant", "clip_low": 0.2, "clip_high": 0.2}),
        (["--loss_type", "cispo", "--epsilon_high", "5.0"], {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        (
            ["--loss_type", "grpo", "--importance_sampling_level", "sequence", "--epsilon", "3e-4"],
            {"name": "gspo", "aggregate": "sequence", "clip_low": 3e-4, "clip_high": 3e-4},
        ),
    ],
)
def test_a_loss_is_the_one_that_trl_computes(flags, loss):
    values, _ = convert(*flags)
    assert values["loss"] == loss
    config = Config(**values)
    assert not config.refill and config.advantage.std  # scale_rewards is a flag of its own in TRL, also for dr_grpo


def test_the_kl_term_has_the_gradient_of_trl():
    """TRL multiplies k3 by the ratio, which has a gradient even where it is 1."""
    torch.manual_seed(0)
    logprobs = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    reference, mask = torch.randn(3, 5, dtype=torch.float64), torch.ones(3, 5)
    for correction in (True, False):
        values, _ = convert("--beta", "0.1", "--use_bias_correction_kl", str(correction))
        theirs = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        theirs = theirs * torch.exp(logprobs - logprobs.detach()) if correction else theirs
        ours = kl(logprobs, reference, mask, values["loss"]["kl_estimator"])
        gradients = [torch.autograd.grad(each.sum(), logprobs)[0] for each in (ours, theirs)]
        torch.testing.assert_close(*gradients)
        assert values["loss"]["kl_coef"] == 0.1


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_falls_as_in_trl(schedule):
    values, _ = convert("--lr_scheduler_type", schedule, "--learning_rate", "1e-2")
    weight = torch.nn.Linear(2, 2)
    ours = Optimizer(weight, OptimizerConfig(**values["optimizer"]), values["steps"])
    adam = torch.optim.AdamW(weight.parameters(), lr=1e-2)
    theirs = get_scheduler(schedule, adam, num_warmup_steps=0, num_training_steps=8)
    for step in range(8):
        assert ours.lr_at(step) == pytest.approx(adam.param_groups[0]["lr"])
        adam.step()
        theirs.step()


def test_settings_that_trl_leaves_at_another_default_are_written():
    values, notes = convert()
    optimizer = values["optimizer"]
    assert (optimizer["betas"], optimizer["weight_decay"], optimizer["schedule"]) == ([0.9, 0.999], 0.0, "linear")
    assert values["seed"] == 42 and values["rollout"]["max_tokens"] == 512 and values["reward"]["truncated"] == "grade"
    assert values["data"] == {"train": "me/data::train"} and values["reward"]["function"] == "my_lib.rewards:right"
    assert any("set data.raw = true for text" in note for note in notes)


def test_rewards_become_a_weighted_sum():
    flags = ["--reward_funcs", "accuracy_reward", "get_soft_overlong_punishment", "a.b.c", "--max_completion_length", "1280"]
    values, _ = convert(*flags, "--reward_weights", "1.0", "1.0", "0.2")
    assert (
        values["reward"]["function"] == "trl.rewards:accuracy_reward + 0.2 * a.b:c" and values["advantage"]["overlong"] == 256
    )


def test_epochs_need_the_number_of_prompts():
    text, notes = from_trl.convert([*BASE[:-2], "--num_train_epochs", "2", "--gradient_accumulation_steps", "4"])
    assert "steps" not in tomllib.loads(text)
    assert "--num_train_epochs 2.0: steps is not set: set it to 2 * training prompts / 4." in notes


# Before and after


def test_a_config_of_trl_trains_a_step_in_both(tmp_path, monkeypatch, capsys):
    """The example of the guide, with shorter answers: in TRL's own script, and converted in `sparse-rl train`."""
    shutil.copytree(EXAMPLE, tmp_path / "example")
    monkeypatch.chdir(tmp_path / "example")
    monkeypatch.syspath_prepend(".")
    short = [
        "--max_steps",
        "1",
        "--max_completion_length",
        "40",
        "--per_device_train_batch_size",
        "16",
        "--disable_tqdm",
        "true",
    ]

    monkeypatch.setattr(
        "sys.argv", ["grpo.py", "--config", "grpo.yaml", "--model_name_or_path", str(TINY), "--use_cpu", *short]
    )
    runpy.run_path(grpo.__file__, run_name="__main__")
    assert Path("trl-sums/model.safetensors").exists()

    capsys.readouterr()
    main(["from-trl", "--config", "grpo.yaml", "--model_name_or_path", "tiny", "--output_dir", "ours", *short])
    recipe, notes = capsys.readouterr()
    assert "sparse-rl: --logging_steps 1.0: not carried over, every step goes to metrics.jsonl" in notes
    guide = (EXAMPLE.parents[1] / "docs/coming-from-trl.md").read_text()
    assert all(note in guide for note in notes.splitlines() if "kv.budget" not in note and "disable_tqdm" not in note)
    Path("sums.toml").write_text(recipe)
    main(["train", "sums.toml", "--data.raw", "true"])
    (row,) = [row for row in metrics(Path("ours")) if row["step"] == 1]
    assert row["policy/lr"] == 1e-4 and row["kv/peak_tokens"] <= 64 + 16
    stored = tomllib.loads(Path("ours/config.toml").read_text())
    assert (stored["rollout"]["prompts_per_step"], stored["rollout"]["max_tokens"]) == (2, 40)


# Bad input


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--num_generation", "4"],
            "'--num_generation' is not a flag of trl grpo in TRL .*: did you mean --num_generations[?]",
        ),
        (
            ["--max_prompt_length", "64"],
            "is not a flag of trl grpo in TRL .*: remove it, and set data.max_prompt_tokens in the recipe.",
        ),
        (
            ["--num_generations", "many"],
            "does not accept these flags .*--num_generations.*invalid int value: 'many'.*: correct the flag",
        ),
        (
            ["--num_generations", "3"],
            "TRL generates 8 sequences at once, which is not a multiple of --num_generations 3: change one.",
        ),
        (
            ["--steps_per_generation", "6", "--gradient_accumulation_steps", "4"],
            "TRL generates 48 sequences at once and uses 32 per update, which sparse-rl does not mix: let one be a multiple",
        ),
        (
            ["--loss_type", "vespo"],
            "--loss_type vespo has no counterpart: use one of grpo, dapo, dr_grpo, cispo, or keep TRL's",
        ),
        (["--loss_type", "cispo"], "caps the ratio at --epsilon_high = 0.2, below 1: pass --epsilon_high 5.0"),
        (["--lr_scheduler_type", "polynomial"], "--lr_scheduler_type polynomial has no counterpart: use one of linear"),
        (["--dataset_name", "gsm8k"], "--dataset_name 'gsm8k' is not a dataset of the hub: write owner/name, or a folder."),
        (["--reward_funcs", "accuracy"], "--reward_funcs accuracy is not a reward of TRL: use one of accuracy_reward"),
        (["--reward_weights", "1", "2"], "--reward_weights has 2 values for 1 reward: pass one weight for each."),
        (["--temperature", "0"], "temperature"),
        (["--config", "nowhere.yaml"], "The config 'nowhere.yaml' cannot be read .*: pass a YAML file of TRL."),
        (["--config"], "The config '' cannot be read"),
    ],
)
def test_flags_that_cannot_be_converted_end_in_one_sentence(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        convert(*flags)


def test_answers_without_a_limit_are_refused(tmp_path):
    (tmp_path / "grpo.yaml").write_text("max_completion_length: null\n")
    with pytest.raises(UserError, match="max_completion_length is null, and sparse-rl needs a limit: pass"):
        convert("--config", str(tmp_path / "grpo.yaml"))


@pytest.mark.parametrize(
    ("missing", "sentence"), [(0, "no model: add --model_name"), (2, "no dataset: add"), (4, "no reward: add")]
)
def test_a_command_without_model_data_or_reward_says_what_is_missing(missing, sentence):
    with pytest.raises(UserError, match=sentence):
        from_trl.convert(BASE[:missing] + BASE[missing + 2 :])


def test_another_version_of_trl_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sparse_rl.integrations.trl_version.version", lambda name: "0.29.1")
    sentence = refused(capsys, "from-trl", *BASE)
    assert sentence.startswith("TRL 0.29.1 is not supported") and "install one from 1.15 to below 1.17" in sentence


@pytest.mark.parametrize(
    "words", [["trl", "grpo"], ["accelerate", "launch", "--num_processes", "2", "train.py"], ["python", "train.py"]]
)
def test_a_whole_command_can_be_pasted(words):
    values, _ = from_trl.convert([*words, *BASE])
    assert tomllib.loads(values)["rollout"]["prompts_per_step"] == (2 if "accelerate" in words else 1)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--num_generations", "--num_generations is a flag of TRL: sparse-rl calls this --rollout.samples-per-prompt"),
        ("--learning-rate=1e-6", "--learning_rate is a flag of TRL: sparse-rl calls this --optimizer.lr"),
        (
            "--num_iterations",
            "--num_iterations is a flag of TRL and has no counterpart: every rollout is used for one update.",
        ),
        ("--vllm_mode", "--vllm_mode is a flag of TRL and has no counterpart: the built-in engine samples."),
        ("--rollout.slot", "unknown argument --rollout.slot: did you mean --rollout.slots?"),
    ],
)
def test_train_answers_a_flag_of_trl_with_ours(flag, sentence, capsys):
    assert refused(capsys, "train", "quickstart", flag, "8").startswith(sentence)
