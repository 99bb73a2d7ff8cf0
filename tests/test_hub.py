"""Models go to the hub and come back, and data comes from it: over HTTP, to a hub on this machine (`local_hub.py`)."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM

from local_hub import TOKEN, local_hub
from small_runs import arguments, metrics, refused, train
from sparse_rl import UserError
from sparse_rl.config import Config
from sparse_rl.train.card import BARS, model_card, sparkline

PROMPT = torch.tensor([[0, 25, 29, 23, 25, 14, 27, 24, 32]])


@pytest.fixture(scope="module")
def hub():
    with local_hub() as server:
        yield server
    assert server.unknown == []


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """A run of all weights and one of an adapter, two steps each."""
    folder = tmp_path_factory.mktemp("runs")
    train(
        world, folder / "full", "--checkpoint.every", "1", "--data.test", str(world / "problems.jsonl"), "--eval.problems", "2"
    )
    train(world, folder / "lora", "--model.lora.rank", "2", "--optimizer.lr", "0.1")
    return folder


@pytest.fixture(scope="module")
def process(hub, tmp_path_factory):
    """A function that runs `sparse-rl` with the local hub, and returns (exit code, output, errors)."""
    home = tmp_path_factory.mktemp("home")
    files = [home / "stdout", home / "stderr"]
    env = os.environ | hub.environment(home) | {"OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("hub_process.py")
    with subprocess.Popen([sys.executable, script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:

        def run(*words, token=TOKEN):
            host.stdin.write(json.dumps([list(map(str, words)), {"HF_TOKEN": token or ""}, *map(str, files)]) + "\n")
            host.stdin.flush()
            return int(host.stdout.readline()), *(file.read_text() for file in files)

        yield run
        host.stdin.close()


@pytest.fixture(scope="module")
def pushed(hub, runs, process):
    """The run of all weights as me/full, exported to no folder."""
    code, out, err = process("export", runs / "full", "--push", "me/full")
    assert code == 0, err
    assert f"Pushed step 2 of {runs / 'full'} to {hub.url}/me/full." in out
    return hub.repositories["models", "me/full"]


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(PROMPT).logits


def downloaded(repository, folder):
    for name, content in repository.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_a_pushed_model_is_the_trained_one_in_one_commit(pushed, runs, tmp_path):
    assert pushed.commits == ["initial commit", "Add step 2 of a sparse_rl run"] and not pushed.private
    assert torch.equal(logits(downloaded(pushed, tmp_path)), logits(runs / "full/model"))


def test_the_card_says_how_the_model_was_trained(pushed, runs):
    card = pushed.files["README.md"].decode()
    about = front_matter(card)
    assert about["library_name"] == "transformers" and {"sparse-rl", "grpo"} <= set(about["tags"])
    assert "base_model" not in about and "datasets" not in about  # files of this machine
    for line in (
        "| method, correction | sparse\\_rl, paper |",
        "| KV cache of the sampler | rkv 20+4 |",
        "| step | 2 of 2 |",
        "a KV cache of at most 24 tokens per layer and head",
        'from_pretrained("me/full")',
        'sparse-rl generate me/full "a prompt"',
        "budget = 20",
        "## Held-out",
        f"torch {torch.__version__}",
    ):
        assert line in card, line
    rewards = [row["reward/mean"] for row in metrics(runs / "full")[1:]]
    assert f"| mean reward | {rewards[0]:.3g} | `{sparkline(rewards)}` | {rewards[1]:.3g} |" in card
    assert str(runs.parent) not in card, "a card shows no folder of the machine"


def test_a_pushed_model_trains_on_with_its_kv_settings_and_data_of_the_hub(hub, pushed, process, tmp_path, world):
    rows = (world / "problems.jsonl").read_bytes()
    config = {"configs": [{"config_name": "sums", "data_files": [{"split": "train", "path": "a/*.jsonl"}]}]}
    card = f"---\n{yaml.safe_dump(config)}---\n".encode()
    hub.put("datasets", "me/problems", {"a/train.jsonl": rows, "README.md": card}, private=True)
    flags = ["--model.path", "me/full", "--data.train", "me/problems:sums:train", "--steps", "1"]
    code, out, err = process(*arguments(world, tmp_path / "run", *flags))
    assert code == 0, err
    assert metrics(tmp_path / "run")[-1]["step"] == 1
    assert "base_model: me/full" in (tmp_path / "run/model/README.md").read_text()
    code, out, err = process("generate", "me/full", "15:47+85=", "--max-tokens", "30")
    assert code == 0 and "for 1 slot of 24 tokens" in out, err


def test_another_push_replaces_the_model_and_leaves_other_files(hub, runs, process, tmp_path):
    """An adapter after a model: transformers would load a model that is left beside it."""
    repository = hub.put("models", "me/mine", {"notes.txt": b"mine", "model.safetensors": b"old", "config.json": b"{}"})
    code, out, err = process("export", runs / "lora", tmp_path / "out", "--push", "me/mine")
    assert code == 0, err
    assert f"Exported step 2 of {runs / 'lora'} to {tmp_path / 'out'}." in out
    assert "which is not on the hub: others can load it only if pushed with --merge." in out.replace("\n", " ")
    assert set(repository.files) == {"notes.txt", *(path.name for path in (tmp_path / "out").iterdir())}
    assert "adapter_model.safetensors" in repository.files and "model.safetensors" not in repository.files
    assert front_matter(repository.files["README.md"].decode())["library_name"] == "peft"
    (tmp_path / "copy").mkdir()
    assert torch.equal(logits(downloaded(repository, tmp_path / "copy")), logits(runs / "lora/model"))


def test_a_result_in_python_can_be_pushed_merged_and_private(hub, runs, process):
    code, out, err = process(
        "-c",
        "from sparse_rl import Config, TrainResult\n"
        f"result = TrainResult(Config(run_dir={str(runs / 'lora')!r}, model={{'lora': {{'rank': 2}}}}), finished=True)\n"
        "print(result.push_to_hub('merged', merge=True, private=True))\n",
    )
    assert code == 0 and out.splitlines()[-1] == f"{hub.url}/me/merged", err
    repository = hub.repositories["models", "me/merged"]
    assert repository.private and "model.safetensors" in repository.files
    assert "merged into the weights" in repository.files["README.md"].decode()


@pytest.mark.parametrize(
    ("words", "token", "sentence"),
    [
        (
            ["--push", "me/other"],
            None,
            "A push to me/other needs a token of the hub: log in with `hf auth login`, or set HF_TOKEN.",
        ),
        (["--push", "me/other"], "hf_wrong", "The hub does not accept the token for a push to me/other: log in again with"),
        (
            ["--push", "them/theirs"],
            TOKEN,
            "The token has no right to write to them/theirs: use a token with write access, or",
        ),
        (["--push", "me/full", "--private"], TOKEN, "me/full exists and is public, so --private has no effect: pass another"),
    ],
)
def test_a_push_that_the_hub_refuses_ends_in_one_sentence(hub, pushed, runs, process, words, token, sentence):
    before = {key: dict(each.files) for key, each in hub.repositories.items()}
    code, _, err = process("export", runs / "full", *words, token=token)
    assert code == 2 and err.startswith(f"sparse-rl: {sentence}") and err.count("\n") == 1, err
    assert {key: each.files for key, each in hub.repositories.items()} == before


def test_a_hub_that_does_not_answer_is_reported_before_the_weights_are_loaded(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://localhost:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    sentence = refused(capsys, "export", str(runs / "full"), str(tmp_path / "out"), "--push", "me/x")
    assert sentence.startswith("The hub cannot be reached for a push to me/x (") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("repo", ["a b", "me/a/b", "https://huggingface.co/me/mine", "me/", "me/-x", ""])
def test_a_malformed_repository_is_refused(runs, repo, capsys):
    sentence = refused(capsys, "export", str(runs / "full"), "--push", repo)
    assert (
        sentence
        == f"{repo!r} is not a repository id: write owner/name with letters, digits, '-', '_' and '.', such as me/my-model."
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "export has no target: pass a folder to write, or --push REPO."),
        (["{out}", "--private"], "--private is an option of a push: add --push REPO, or omit it."),
    ],
)
def test_an_export_without_a_target_says_what_to_pass(runs, tmp_path, words, sentence, capsys):
    assert refused(capsys, "export", str(runs / "full"), *(word.format(out=tmp_path / "out") for word in words)) == sentence


@pytest.mark.parametrize(
    ("id", "sentence"),
    [
        ("me/nothing", "Hub dataset me/nothing does not exist or is private: check its name, or log in with `hf auth login`."),
        (
            "me/problems2:other:train",
            "me/problems2 other train cannot be loaded from the hub (BuilderConfig 'other' not found",
        ),
    ],
)
def test_data_that_the_hub_does_not_have_is_refused(hub, process, world, tmp_path, id, sentence):
    hub.put("datasets", "me/problems2", {"train.jsonl": (world / "problems.jsonl").read_bytes()})
    code, _, err = process(*arguments(world, tmp_path / "run", "--data.train", id))
    assert code == 2 and sentence in err and not (tmp_path / "run").exists(), err


# The card alone


def test_a_card_names_the_base_model_and_the_data_of_the_hub():
    config = Config(model={"path": "Qwen/Qwen2.5-0.5B"}, data={"train": "gsm8k"}, method="dense")
    card = model_card(config, config.sampler_kv, [], 100, "me/mine")
    about = front_matter(card)
    assert (about["base_model"], about["datasets"]) == ("Qwen/Qwen2.5-0.5B", ["openai/gsm8k"])
    assert "Rollouts ran on a dense KV cache." in card and "## Curves" not in card and "sparse-rl generate" not in card
    own = config.model_copy(update={"data": config.data.model_copy(update={"train": "me/mine:main:train"})})
    with pytest.raises(UserError):
        model_card(own, own.sampler_kv, [], 100, "me/mine")


@pytest.mark.parametrize(
    ("kv", "cache"),
    [
        ({"policy": "full", "dtype": "4bit"}, "a KV cache with all keys in 4 bits."),
        (
            {"policy": "streaming", "dtype": "8bit"},
            "a KV cache of at most 640 tokens per layer and head in 8 bits, plus the prompt.",
        ),
    ],
)
def test_a_card_names_the_bits_of_the_cache(kv, cache):
    config = Config(kv=kv)
    assert f"Rollouts ran on {cache}" in model_card(config, config.sampler_kv, [], 100, "me/mine")


@pytest.mark.parametrize(
    ("method", "kept"), [("dense", None), ("naive", {"policy": "full", "dtype": "8bit"})], ids=["dense", "full"]
)
def test_a_card_names_no_budget_of_a_cache_that_keeps_all_keys(method, kept):
    config = Config(
        method=method, kv={"policy": "full", "dtype": "8bit", "budget": 64, "interval": 16, "window": 4, "sinks": 2}
    )
    rows = [{"step": step, "kv/budget": 4096.0, "reward/mean": 0.5} for step in (1, 2)]
    card = model_card(config, config.sampler_kv, rows, 2, "me/mine")
    assert "budget" not in card and "| mean reward | 0.5 |" in card
    assert tomllib.loads(card.split("```toml\n")[1].split("```")[0]).get("kv") == kept


def test_a_card_shows_no_folder_of_the_machine(tmp_path):
    config = Config(
        model={"path": str(tmp_path / "models/base")},
        data={"train": str(tmp_path / "a/rows.jsonl"), "test": [str(tmp_path / "b.jsonl"), "gsm8k"]},
        reward={"function": f"math_answer + 0.2 * {tmp_path}/rewards.py:brief"},
    )
    card = model_card(config, config.sampler_kv, [], 1, "me/mine")
    assert tmp_path.name not in card and str(tmp_path.parent) not in card
    assert 'function = "math_answer + 0.2 * rewards.py:brief"' in card and 'test = [\n    "b.jsonl",\n    "gsm8k",\n]' in card


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value():
    assert sparkline([0.0, 1.0]) == BARS[0] + BARS[-1]
    assert sparkline([2.0, 2.0, 2.0]) == BARS[0] * 3
    assert sparkline([float(number // 100) for number in range(800)], 8) == BARS


def test_the_local_hub_keeps_private_repositories_private(hub):
    hub.put("models", "me/secret", {"a.txt": b"a"}, private=True)
    with pytest.raises(RepositoryNotFoundError):
        huggingface_hub.HfApi(hub.url, token="hf_wrong").model_info("me/secret")
    assert huggingface_hub.HfApi(hub.url, token=TOKEN).model_info("me/secret").private
