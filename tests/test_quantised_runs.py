"""Runs, evaluations and transformers with an 8-bit or 4-bit cache: statistics travel, and quantisation is measured."""

import hashlib
import json

import pytest
import torch

from small_runs import arguments, metrics, one_thread, refused, train
from sparse_rl import KV, Config, Engine, Sampling, UserError, replay
from sparse_rl.cli import main
from sparse_rl.evaluate.compare import settings
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv import statistics
from sparse_rl.kv.statistics import KeyRanges
from sparse_rl.models.stored_statistics import stored_statistics
from sparse_rl.rollout.calibrate import calibrate
from sparse_rl.train import probe
from test_transformers_cache import PROMPTS, SETTINGS, greedy

LONG = list(range(3, 60))


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Statistics


def test_statistics_do_not_depend_on_order_and_cover_all_positions(model):
    """Rotary channels reach their range at other positions than those of a short prompt."""
    found = []
    for prompts, longest in (([LONG, [7, 8, 9]], 2000), ([[7, 8, 9], LONG, LONG], 2000), ([LONG, [7, 8, 9]], 57)):
        ranges = KeyRanges()
        calibrate(model, prompts, longest, [ranges])
        found.append(ranges.statistics())
    assert equal(found[0], found[1]) and not equal(found[0], found[2])
    assert bool((found[0]["key_step"] >= found[2]["key_step"]).all())
    assert found[0]["key_step"].shape == (2, 2, 16) and found[0]["key_step"].dtype == torch.float16


@pytest.mark.parametrize("first", [[5], [5, 6, 7]], ids=len)
def test_a_short_first_call_does_not_spoil_the_scales(model, first):
    """Slow rotary channels hardly vary over a few tokens: their steps must not determine those of all others."""
    calibrated, warmed = (Engine(model, KV(policy="full", dtype="8bit"), slots=1) for _ in range(2))
    warmed.generate([first], sampling=Sampling(max_tokens=1, stop=()))
    gaps = []
    for engine in (calibrated, warmed):
        (rollout,) = engine.generate([LONG], sampling=Sampling(max_tokens=60, stop=()))
        (dense,) = replay(model, [rollout], "dense")
        gaps.append(float((dense.detach() - rollout.logprobs).abs().mean()))
    assert gaps[1] < 8 * gaps[0] + 0.01


def test_statistics_stay_until_they_are_gathered_again(model, tmp_path):
    kv, sampling = KV(policy="full", dtype="4bit"), Sampling(max_tokens=8, stop=(), seed=1)
    engine = Engine(model, kv, slots=2)
    first = engine.generate([LONG], sampling=sampling)[0]
    before = engine.statistics
    engine.generate([[9, 9, 9]], sampling=sampling)
    assert engine.statistics is before
    statistics.save(before, tmp_path)
    other = Engine(model, kv, slots=1)
    other.load_statistics(statistics.load(tmp_path))
    again = other.generate([LONG], sampling=sampling)[0]
    assert torch.equal(first.logprobs, again.logprobs)
    other.calibrate([[9, 9, 9]], 100)
    assert torch.equal(first.quantiser.scales.step_LHD, before["key_step"]) and not equal(other.statistics, before)
    with pytest.raises(UserError, match="the model has"):
        other.load_statistics({name: each[:, :1] for name, each in before.items()})
    (tmp_path / statistics.FILE).write_text("no tensors")
    with pytest.raises(UserError, match="remove it"):
        statistics.load(tmp_path)


# Runs


def test_a_run_writes_its_statistics_and_the_model_is_used_with_them(world, tmp_path, capsys):
    train(world, tmp_path / "run", "--kv.dtype", "8bit", "--kv.protect-prompt", "true", "--steps", "2")
    out = capsys.readouterr().out
    assert "kv.dtype = 8bit without eviction: mismatch k3" in out
    stored = json.loads((tmp_path / "run/model/sparse_rl.json").read_text())
    assert stored["kv"]["dtype"] == "8bit"
    found = statistics.load(tmp_path / "run/model")
    assert found["key_centre"].shape == (2, 2, 8)
    assert metrics(tmp_path / "run")[-1]["sparse/engine_noise"] < 1e-3
    with one_thread():
        main(["generate", str(tmp_path / "run/model"), "1:41+85=", "--max-tokens", "4"])
        main(["export", str(tmp_path / "run"), str(tmp_path / "exported")])
    assert equal(statistics.load(tmp_path / "exported"), found)


def test_the_model_names_its_statistics_and_refuses_others(world, tmp_path, capsys):
    """Also if they are missing. A model of an earlier version names none, and uses those that are there."""
    folder = tmp_path / "run/model"
    train(world, tmp_path / "run", "--kv.dtype", "8bit", "--steps", "1")
    file, settings = folder / "sparse_rl.statistics", json.loads((folder / "sparse_rl.json").read_text())
    whole = file.read_bytes()
    assert settings["statistics"] == {"file": file.name, "sha256": hashlib.sha256(whole).hexdigest()}
    assert BoundedCache.from_pretrained(folder).kv.dtype == "8bit"
    generate = ["generate", str(folder), "1:41+85=", "--max-tokens", "4"]
    evaluation = ["eval", str(folder), "--benchmarks", str(world / "problems.jsonl"), "--problems", "1", "--max-tokens", "4"]
    evaluation += [
        "--reward.function",
        f"{world / 'rewards.py'}:sums",
        "--reward.workers",
        "0",
        "--out",
        str(tmp_path / "eval"),
    ]
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    capsys.readouterr()
    for command in (generate, evaluation):
        with pytest.raises(SystemExit), one_thread():
            main(command)
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"sparse-rl: {file} does not match the SHA-256 in sparse_rl.json: copy the whole model folder again, or remove "
            "the file and the entry statistics of sparse_rl.json to gather the statistics again."
        )
    file.unlink()
    with pytest.raises(UserError, match=f"{file} is missing, but named in sparse_rl.json: copy the whole"):
        BoundedCache.from_pretrained(folder)
    file.write_bytes(whole)
    del settings["statistics"]
    (folder / "sparse_rl.json").write_text(json.dumps(settings))
    assert equal(stored_statistics(str(folder)), statistics.load(folder))


def test_a_dense_cache_in_4_bits_counts_as_sparse(world, tmp_path):
    """Its mismatch is not only noise, is corrected, and its noise is measured by replay."""
    train(world, tmp_path / "run", "--kv.policy", "full", "--kv.dtype", "4bit", "--steps", "1")
    row = metrics(tmp_path / "run")[-1]
    assert row["sparse/mismatch_k3"] > 1e-6 and row["sparse/xi_p05"] < 1 and row["sparse/engine_noise"] < 1e-2
    assert row["kv/token_savings"] == 0


def test_a_cache_that_ruins_the_model_is_refused(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(probe, "REFUSED_K3", 1e-9)
    sentence = refused(capsys, *arguments(world, tmp_path / "run", "--kv.dtype", "4bit", "--kv.policy", "full"))
    assert sentence.startswith("kv.dtype = 4bit without eviction: mismatch k3") and "set kv.dtype = 8bit or auto" in sentence
    monkeypatch.setattr(probe, "REFUSED_K3", 1e9)
    found = probe.Probe("8bit", 0.3, 0.5, 0.0)
    assert "For less, set kv.dtype = auto" in found.warning()
    assert probe.Probe("8bit", 1e-4, 0.99, 0.0).warning() is None
    with pytest.raises(UserError, match="ruins"):
        probe.Probe("4bit", 0.001, 0.5, 0.6).warning()


def test_method_dense_refuses_bits_that_it_would_not_use(world, tmp_path, capsys):
    """A comparison may have both: its dense arm is the reference in the model's dtype."""
    flags = ["--method", "dense", "--kv.dtype", "4bit"]
    for more in ([], ["--dry-run"]):
        assert refused(capsys, *arguments(world, tmp_path / "run", *flags), *more) == (
            "kv.dtype = 4bit has no effect with method = dense, which samples in the model's dtype: set method = sparse_rl and "
            "kv.policy = full to keep all keys in 4 bits, or kv.dtype = auto."
        )
    assert not (tmp_path / "run").exists()
    Config(method="dense", compare=("dense", "sparse_rl"), kv={"dtype": "4bit"}).refuse_unused_bits()


# Evaluation


def test_caches_are_named_with_their_dtype():
    found = settings("full,full:4bit,rkv@64+8:8bit,rkv@64", {}, {})
    assert [each.name for each in found] == ["full", "full:4bit", "rkv@64+8:8bit", "rkv@64"]
    assert [each.kv.dtype for each in found] == ["auto", "4bit", "8bit", "auto"]
    assert [each.name for each in settings(None, {"dtype": "8bit", "policy": "full"}, {})] == ["full", "full:8bit"]
    assert [each.name for each in settings(None, {}, {"policy": "full", "dtype": "4bit"})] == ["full", "full:4bit"]
    assert settings("my_module:Mine@64:8bit", {}, {})[0].name == "my_module:Mine@64:8bit"
    with pytest.raises(UserError, match="not a valid cache"):
        settings("full:5bit", {}, {})


def test_the_mismatch_is_split_into_quantisation_and_eviction(world, tmp_path):
    out = tmp_path / "eval"
    flags = ["--compare", "full,full:4bit,rkv@20:8bit", "--mismatch", "--max-tokens", "30", "--problems", "4"]
    reward = ["--reward.function", f"{world / 'rewards.py'}:sums", "--reward.workers", "0"]
    with one_thread():
        main(["eval", str(world / "model"), "--benchmarks", str(world / "problems.jsonl"), *flags, *reward, "--out", str(out)])
    found = {row["setting"]: row["mismatch"] for row in json.loads((out / "results.json").read_text())["results"]}
    assert "quantisation_k3" not in found["full"]
    assert found["full:4bit"]["quantisation_k3"] > 10 * found["full:4bit"]["eviction_k3"]
    assert found["rkv@20:8bit"]["eviction_k3"] > 10 * found["rkv@20:8bit"]["quantisation_k3"]
    assert all(row["engine_noise"] < 1e-2 for row in found.values())
    assert (out / statistics.FILE).exists()


def test_caches_that_need_different_statistics_are_evaluated_without_a_warning(world, tmp_path, capsys):
    """The statistics that the first cache left in the folder are no others than those of the model: nothing differs."""
    out = tmp_path / "eval"
    flags = ["--compare", "full:8bit,triattention@16,expected@16:4bit", "--max-tokens", "20", "--problems", "1"]
    flags += ["--reward.function", f"{world / 'rewards.py'}:sums", "--reward.workers", "0", "--out", str(out)]
    with one_thread():
        main(["eval", str(world / "model"), "--benchmarks", str(world / "problems.jsonl"), *flags])
    assert "gathered again" not in capsys.readouterr().err
    assert {"key_step", "query_mean", "query_covariance"} <= statistics.load(out).keys()


# transformers


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
@pytest.mark.parametrize("protect_prompt", [False, True])
def test_generate_with_a_quantised_cache_is_the_engine(model, dtype, protect_prompt):
    """Left-padded, three lengths in a batch, with the engine's statistics."""
    model.set_attn_implementation("sparse_rl")
    options = {"protect_prompt": protect_prompt, "dtype": dtype, **SETTINGS}
    engine = Engine(model, KV(policy="rkv", **options), slots=3)
    expected = engine.generate(PROMPTS, sampling=Sampling(max_tokens=30, temperature=0, stop=()))
    cache = BoundedCache("rkv", statistics=engine.statistics, **options)
    assert greedy(model, PROMPTS, cache, tokens=30) == [rollout.response for rollout in expected]
    head = 16 + 2 if dtype == "8bit" else 8 + 2 * 2
    assert cache.kv_bytes == 2 * 2 * 3 * 2 * ((37 if protect_prompt else 0) + 24 + 6) * head
    assert len(greedy(model, PROMPTS, BoundedCache("rkv", **options), tokens=10)) == 3  # scales of the prompts themselves
