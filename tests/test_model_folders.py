"""Model folders that are damaged or hostile: one sentence, and no code of theirs runs."""

import contextlib
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from small_runs import refused
from sparse_rl import KV, Engine, Sampling, UserError, load_model, load_tokenizer
from sparse_rl.cli import main
from sparse_rl.config import DataConfig
from sparse_rl.data import prompts
from sparse_rl.data.examples import Example
from sparse_rl.data.prompts import encode, encoded
from sparse_rl.errors import notice
from sparse_rl.models.folder import check_model_folder
from sparse_rl.models.stored_kv import stored_kv
from sparse_rl.rollout.rollout import Rollout

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "faults"))
from model_folders import CASES, TINY

PROBLEMS = [Example("12+34=", "46", {}), Example("1+1=", "2", {})]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


def sample(path: Path) -> Rollout:
    """What `generate` does."""
    ids = encoded(load_tokenizer(str(path)), PROBLEMS, DataConfig())
    kv = KV(**({"budget": 64} | stored_kv(str(path))))
    engine = Engine(load_model(str(path), dtype="float32", device="cpu"), kv, slots=2)
    return engine.generate(ids, sampling=Sampling(max_tokens=4))[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_hostile_folder_is_refused_and_runs_nothing(folder, tmp_path, monkeypatch, case):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(prompts, "LIMIT_S", 0.3)
    case.damage(folder, tmp_path / "ran")
    if case.refused_by:
        with pytest.raises(UserError) as error:
            sample(folder)
        assert len(str(error.value)) < 600
    elif case is CASES[0]:
        assert len(sample(folder).response) == 4
    else:
        with contextlib.suppress(UserError):
            sample(folder)
    assert not (tmp_path / "ran").exists()


def adapter_of(base: object, folder: Path) -> Path:
    """An adapter with nothing wrong but, perhaps, its base."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


def test_the_base_of_an_adapter_is_looked_at_like_any_model(folder, tmp_path):
    def told(base: object, name: str) -> str:
        with pytest.raises(UserError) as error:
            check_model_folder(str(adapter_of(base, tmp_path / name)))
        return str(error.value)

    check_model_folder(str(adapter_of(str(folder), tmp_path / "good")))
    check_model_folder(str(adapter_of("Qwen/Qwen2.5-0.5B", tmp_path / "of-the-hub")))
    assert "base_model_name_or_path = None is not a model" in told(None, "none")
    start = f"The base model of the adapter {tmp_path / 'missing'} cannot be used: There is no model folder"
    assert told("./nope", "missing").startswith(start)
    assert " is itself an adapter. Merge it into its base model first." in told(str(tmp_path / "good"), "chain")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))
    assert " refers to code in " in told(str(folder), "code")
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert "it is an incomplete or damaged safetensors file" in told(str(folder), "cut")


@pytest.mark.parametrize("path", ["./nope", "no/such/folder", "nope/", "nope.gguf"])
def test_a_model_that_is_not_there_is_what_the_answer_is_about(capsys, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for command in (["train", "--dry-run", "--model.path", path], ["generate", path, "1+1="]):
        assert f"There is no model {'file' if 'gguf' in path else 'folder'} '{path}' in {tmp_path}" in refused(
            capsys, *command
        )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # transformers makes an empty tokenizer, or none
def test_a_folder_without_a_tokenizer_is_refused_by_a_dry_run(capsys, folder, kind):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    sentence = refused(capsys, "train", "--dry-run", "--model.path", str(folder), "--reward.workers", "0")
    assert "has no tokenizer files" in sentence


def test_weights_that_were_cut_short_are_refused_by_a_dry_run(capsys, folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    sentence = refused(capsys, "train", "--dry-run", "--model.path", str(folder), "--reward.workers", "0")
    assert "model.safetensors is damaged: it is an incomplete or damaged safetensors file" in sentence


@pytest.mark.parametrize("flags", [["--kv.budget", str(2**62)], ["--rollout.slots", "1000000000"]], ids=["budget", "slots"])
def test_a_cache_larger_than_memory_is_refused_in_a_sentence(capsys, tmp_path, flags):
    small = ["--run-dir", str(tmp_path / "run"), "--reward.workers", "0", "--model.device", "cpu", "--rollout.max-tokens", "8"]
    assert "The KV cache of" in refused(capsys, "train", *small, *flags)
    assert not (tmp_path / "run").exists()


# Chat templates

THINKS = "{{ '[thinks]' if enable_thinking is not defined or enable_thinking else '[does not]' }}{{ messages[-1].content }}"


def with_template(folder: Path, template: str) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def test_what_a_chat_template_is_told_reaches_every_command(capsys, folder, tmp_path):
    with_template(folder, THINKS)
    tokenizer = load_tokenizer(str(folder))
    quiet = DataConfig(chat_template_kwargs={"enable_thinking": False})
    assert [tokenizer.decode(ids) for ids in encoded(tokenizer, PROBLEMS, DataConfig())] == ["[thinks]12+34=", "[thinks]1+1="]
    assert [tokenizer.decode(ids) for ids in encoded(tokenizer, PROBLEMS, quiet)] == ["[does not]12+34=", "[does not]1+1="]
    flag = ["--data.chat-template-kwargs", '{"enable_thinking": false}']
    main(["train", "--dry-run", "--model.path", str(folder), "--reward.workers", "0", *flag])
    assert 'tokens: "[does not]' in capsys.readouterr().out
    with_template(folder, THINKS.replace("[does not]", "' + raise_exception('it was told') + '"))
    assert "it was told" in refused(capsys, "generate", str(folder), "1+1=", *flag)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    out = ["--out", str(tmp_path / "out"), "--reward.function", "math_answer"]
    assert "it was told" in refused(capsys, "eval", str(folder), "--benchmarks", str(data), *out, *flag)


def test_what_is_ours_to_tell_a_template_is_refused():
    with pytest.raises(UserError, match=r"data.chat_template_kwargs sets messages, which sparse-rl sets itself"):
        DataConfig(chat_template_kwargs={"messages": []})


def test_a_chat_model_without_a_template_is_told_once(capsys, folder):
    plain = load_tokenizer(str(folder))
    chatty = load_tokenizer(str(folder.rename(folder.with_name("Tiny-Instruct"))))
    notice.cache_clear()
    encoded(plain, PROBLEMS, DataConfig())
    encoded(chatty, PROBLEMS, DataConfig(raw=True))
    assert capsys.readouterr().err == ""
    encoded(chatty, PROBLEMS, DataConfig())
    encoded(chatty, PROBLEMS, DataConfig())
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "Tiny-Instruct looks like a chat model, but its tokenizer has no chat template" in told


def test_a_template_is_stopped_in_any_thread(monkeypatch, folder):
    monkeypatch.setattr(prompts, "LIMIT_S", 0.3)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    found = []

    def run():
        try:
            encode(tokenizer, PROBLEMS[0])
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and "took more than 0.3 s for one prompt" in found[0]
