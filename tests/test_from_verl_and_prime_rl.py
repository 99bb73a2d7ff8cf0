"""The recipes for users of verl and prime-rl have the settings of the file before them, and train."""

import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from small_runs import REWARDS, metrics, one_thread
from sparse_rl.cli import main
from sparse_rl.config import Config

ROOT = Path(__file__).parents[1]
VERL = ROOT / "examples/from_verl"
PRIME_RL = ROOT / "examples/from_prime_rl"
TINY_STEP = {
    "model.path": "tiny", "steps": 1, "run-dir": "run", "kv.budget": 16, "kv.interval": 8, "kv.window": 4,
    "rollout.prompts-per-step": 2, "rollout.samples-per-prompt": 4, "rollout.max-tokens": 40, "reward.workers": 1, "eval.problems": 0,
}  # fmt: skip


def train_tiny_step(recipe, **settings):
    """Return the metrics of one step of a recipe on the embedded model, in the current folder."""
    flags = [word for key, value in (TINY_STEP | settings).items() for word in (f"--{key}", str(value))]
    with one_thread():
        main(["train", recipe, *flags])
    (row,) = [row for row in metrics(Path("run")) if row["step"] == 1]
    assert row["kv/evictions"] > 0 and row["reward/errors"] == 0
    assert row["policy/grad_norm"] > 0  # absent if no group has two different rewards
    return row


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("coming-from-verl.md", [VERL / "grpo.sh", VERL / "grpo.toml"]),
        ("coming-from-prime-rl.md", [PRIME_RL / "rl.toml", PRIME_RL / "reverse_text.toml"]),
    ],
)
def test_a_page_shows_the_files_as_they_are(page, files):
    shown = re.findall(r"^```\w+\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert shown == [file.read_text() for file in files]


# verl


def test_the_recipe_has_the_settings_of_the_script_of_verl():
    words = shlex.split((VERL / "grpo.sh").read_text(), comments=True)
    before = dict(word.split("=", 1) for word in words if "=" in word)
    actor, rollout = ("actor_rollout_ref.actor.", "actor_rollout_ref.rollout.")
    config = Config(**tomllib.loads((VERL / "grpo.toml").read_text()))
    assert config.model.path == before["actor_rollout_ref.model.path"]
    assert config.rollout.prompts_per_step == int(before["data.train_batch_size"])
    assert config.rollout.samples_per_prompt == int(before[f"{rollout}n"])
    assert config.rollout.max_tokens == int(before["data.max_response_length"])
    assert config.data.max_prompt_tokens == int(before["data.max_prompt_length"])
    updates = int(before["data.train_batch_size"]) // int(before[f"{actor}ppo_mini_batch_size"])
    assert config.optimizer.updates_per_step == updates
    assert config.optimizer.lr == float(before[f"{actor}optim.lr"])
    assert config.loss.kl_coef == float(before[f"{actor}kl_loss_coef"])
    every = [config.steps, config.eval.every, config.checkpoint.every]
    assert every == [int(before[f"trainer.{name}"]) for name in ("total_training_steps", "test_freq", "save_freq")]


def test_the_recipe_for_users_of_verl_trains(tmp_path, monkeypatch):
    """On the embedded task, since GSM8K is a download."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    task = {"data.train": "arithmetic", "data.test": "arithmetic", "reward.function": "rewards.py:sums"}
    row = train_tiny_step(str(VERL / "grpo.toml"), **task)
    assert "policy/kl_ref" in row and row["policy/lr"] == 2e-6


# prime-rl


def test_the_recipe_has_the_settings_of_the_config_of_prime_rl():
    before = tomllib.loads((PRIME_RL / "rl.toml").read_text())
    config = Config(**tomllib.loads((PRIME_RL / "reverse_text.toml").read_text()))
    orchestrator, optim = before["orchestrator"], before["trainer"]["optim"]
    assert (config.steps, config.model.path) == (before["max_steps"], before["model"]["name"])
    assert config.rollout.rollouts_per_step == orchestrator["batch_size"]
    assert config.rollout.samples_per_prompt == orchestrator["group_size"]
    assert config.rollout.max_tokens == orchestrator["train"]["sampling"]["max_completion_tokens"]
    assert config.data.max_prompt_tokens + config.rollout.max_tokens == before["seq_len"]
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (optim["lr"], optim["weight_decay"])
    assert config.checkpoint.every == before["ckpt"]["interval"]


def test_the_reward_compares_the_text_in_the_tags_with_the_reversed_sentence():
    spec = importlib.util.spec_from_file_location("reverse_text", PRIME_RL / "reverse_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [json.loads(line) for line in (PRIME_RL / "reverse_text.jsonl").read_text().splitlines()]
    assert rows and all(row["answer"] == row["prompt"][::-1] for row in rows)
    texts = ["It is <reversed_text>\ncba </reversed_text>.", "<reversed_text>cb</reversed_text>", "cba", ""]
    assert module.similarity(completions=texts, answer=["cba"] * 4) == pytest.approx([1.0, 0.8, 0.0, 0.0])


def test_the_recipe_for_users_of_prime_rl_trains(tmp_path, monkeypatch):
    """The embedded model never writes the tags, so that a second reward tells its answers apart."""
    shutil.copytree(PRIME_RL, tmp_path / "example")
    monkeypatch.chdir(tmp_path / "example")
    Path("rewards.py").write_text(REWARDS)
    row = train_tiny_step("reverse_text.toml", **{"reward.function": "reverse_text.py:similarity + rewards.py:sums"})
    assert row["reward/similarity/mean"] == 0 and row["reward/sums/mean"] > 0
