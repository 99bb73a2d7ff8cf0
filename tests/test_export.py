"""What a run leaves is a Hugging Face folder: plain transformers gives the logits that were trained, and vLLM can read it."""

import json
import os

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from small_runs import one_thread, train
from sparse_rl import KV, Engine, Sampling, UserError, load_tokenizer
from sparse_rl.cli import main
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.train import trainer

PROMPT = [0, 25, 29, 23, 25, 14, 27, 24, 32]
WHOLE = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "sparse_rl.json",
}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "sparse_rl.json"}


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """Two runs of two steps, each with the logits that sampler and learner had at their ends."""
    folder, logits = tmp_path_factory.mktemp("runs"), {}
    write_model = trainer.write_model
    for name, flags in {"full": [], "lora": ["--model.lora.rank", "2", "--optimizer.lr", "0.1"]}.items():

        def remember(path, actor, *args, name=name, **options):
            write_model(path, actor, *args, **options)
            with torch.no_grad():
                logits[name] = [model(torch.tensor([PROMPT])).logits for model in (actor.learner, actor.sampler)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "write_model", remember)
            train(world, folder / name, "--checkpoint.every", "1", *flags)
    return folder, logits


def export(run, out, *flags):
    main(["export", str(run), str(out), *flags])
    return out


def plain_logits(folder):
    """As any user of transformers would get them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config._attn_implementation == "sdpa" and model.dtype == torch.float32
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


def test_full_weights_give_the_trained_logits_in_plain_transformers(world, runs, tmp_path):
    folder, logits = runs
    out = export(folder / "full", tmp_path / "out")
    assert torch.equal(plain_logits(out), logits["full"][0])
    assert torch.equal(plain_logits(folder / "full/model"), logits["full"][0])
    assert not torch.allclose(plain_logits(world / "model"), logits["full"][0], atol=1e-2)


def test_an_adapter_gives_the_trained_logits_in_plain_transformers_and_peft(world, runs, tmp_path):
    folder, logits = runs
    out = export(folder / "lora", tmp_path / "out")
    assert torch.equal(plain_logits(out), logits["lora"][0])
    with torch.no_grad():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world / "model"), out)
        assert torch.equal(model(torch.tensor([PROMPT])).logits, logits["lora"][0])


def test_a_merged_adapter_is_the_adapter_up_to_rounding(world, runs, tmp_path):
    folder, logits = runs
    merged = plain_logits(export(folder / "lora", tmp_path / "merged", "--merge"))
    assert torch.equal(merged, logits["lora"][1])  # what sampled
    torch.testing.assert_close(merged, logits["lora"][0], atol=1e-5, rtol=0)  # what learned
    assert not torch.allclose(plain_logits(world / "model"), merged, atol=1e-2)


def test_an_earlier_step_can_be_exported(runs, tmp_path, capsys):
    folder, logits = runs
    first = plain_logits(export(folder / "full", tmp_path / "first", "--step", "1"))
    assert "Exported step 1 of" in capsys.readouterr().out
    assert not torch.equal(first, logits["full"][0])


@pytest.mark.parametrize(
    ("run", "flags", "files"),
    [("full", [], WHOLE), ("lora", ["--merge"], WHOLE), ("lora", [], ADAPTER)],
    ids=["full", "merged", "adapter"],
)
def test_the_layout_is_the_one_others_read(world, runs, tmp_path, run, flags, files):
    out = export(runs[0] / run, tmp_path / "out", *flags)
    assert {path.name for path in out.iterdir()} - {"README.md"} == files
    stored = KV(policy="rkv", budget=20, interval=4, window=4, protect_prompt=False).model_dump(
        mode="json", exclude={"target_rejected"}
    )
    assert json.loads((out / "sparse_rl.json").read_text())["kv"] == stored
    assert AutoTokenizer.from_pretrained(out)("4+8").input_ids == load_tokenizer("tiny")("4+8").input_ids
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if files is WHOLE:
        text = (out / "config.json").read_text()
        assert "sparse_rl" not in text and "attn_implementation" not in text
        assert json.loads(text)["architectures"] == ["Qwen2ForCausalLM"]
        with safe_open(out / "model.safetensors", "pt") as file, safe_open(world / "model/model.safetensors", "pt") as base:
            assert set(file.keys()) == set(base.keys())
    else:
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", 2, str(world / "model"))
        with safe_open(out / "adapter_model.safetensors", "pt") as file:
            names = set(file.keys())
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        assert {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"} <= names and len(names) == 2 * 2 * 7


def test_whoever_may_read_other_files_may_read_the_model(runs, tmp_path):
    before = os.umask(0o027)
    try:
        out = export(runs[0] / "full", tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == dict.fromkeys(os.listdir(out), "0o640")


@pytest.mark.parametrize("run", ["full", "lora"])
def test_generate_keeps_the_settings_of_training_unless_told(runs, tmp_path, run, capsys):
    out = export(runs[0] / run, tmp_path / "out")
    capsys.readouterr()
    with one_thread():
        main(["generate", str(out), "15:47+85=", "--max-tokens", "30"])
        assert "for 1 slot of 24 tokens" in capsys.readouterr().out
        main(["generate", str(out), "15:47+85=", "--max-tokens", "30", "--kv.budget", "30"])
        assert "for 1 slot of 34 tokens" in capsys.readouterr().out


def test_a_cache_from_the_folder_has_the_settings_of_training(runs, tmp_path):
    """In transformers' generate it gives what the engine gives under those settings."""
    out = export(runs[0] / "full", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    model.set_attn_implementation("sparse_rl")
    cache = BoundedCache.from_pretrained(out)
    assert cache.kv == KV(policy="rkv", budget=20, interval=4, window=4, protect_prompt=False)
    ids = torch.tensor([PROMPT])
    ours = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=30, do_sample=False, eos_token_id=-1
    )
    engine = Engine(model, KV(policy="rkv", budget=20, interval=4, window=4, protect_prompt=False), slots=1)
    (rollout,) = engine.generate([PROMPT], sampling=Sampling(max_tokens=30, temperature=0, stop=()))
    assert ours[0, len(PROMPT) :].tolist() == rollout.response


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (
            {"policy": "full"},
            "trained with a dense cache: use transformers' DynamicCache, or pass KV settings explicitly",
        ),
        (
            KV(policy="rkv", budget=1920, protect_prompt=True).model_dump(),
            "counts the prompt.* set kv.budget to 1920 less the tokens of",
        ),
        ({"bugdet": 3}, "did you mean budget?"),
        (None, r"no sparse_rl.json\): pass KV settings explicitly, as in BoundedCache\('rkv', budget=512\)"),
    ],
)
def test_a_folder_without_settings_for_a_cache_is_refused(tmp_path, stored, sentence):
    if stored is not None:
        (tmp_path / "sparse_rl.json").write_text(json.dumps({"kv": stored}))
    with pytest.raises(UserError, match=sentence.replace("?", "[?]")):
        BoundedCache.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{runs}", "{out}"], "is not a run folder (no config.toml): pass a run folder, such as {runs}/full."),
        (["{runs}/nowhere", "{out}"], "is not a run"),
        (["{runs}/full", "{out}", "--step", "7"], "has no checkpoint of step 7: choose one of 1, 2."),
        (["{runs}/full", "{out}", "--merge"], "The run trained all weights and has no adapter to merge: omit --merge."),
        (["{runs}/full", "{runs}/full"], " exists and is not empty: pass another folder."),
        (["{runs}/full", "/proc/nowhere"], "could not be written"),
    ],
)
def test_an_export_that_cannot_be_done_says_why(runs, tmp_path, arguments, sentence, capsys):
    places = {"runs": runs[0], "out": tmp_path / "out"}
    with pytest.raises(SystemExit) as end:
        main(["export", *(argument.format(**places) for argument in arguments)])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("sparse-rl: ") and err.count("\n") == 1
    assert sentence.format(**places) in err and not any(tmp_path.iterdir())
