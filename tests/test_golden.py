"""The policies against the reference implementations' own numbers: golden vectors, see golden/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_rl.kernels.importance import decode_importance
from sparse_rl.kernels.redundancy import redundancy
from sparse_rl.kv.policies import get
from sparse_rl.kv.policies.pooling import pool
from sparse_rl.kv.rotary import Rotary

GOLDEN = Path(__file__).parent / "golden"


def files(pattern):
    found = sorted(GOLDEN.glob(pattern))
    assert found, f"there is no {pattern} in {GOLDEN}"
    return found


def load(path):
    arrays = np.load(path)
    meta = json.loads(str(arrays["meta"]))
    return meta, {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "meta"}


def assert_kept(kept, reference, scores, cut_gap, competing, tie=1e-9):
    """The same set, or, where the reference's cut is a tie, everything above the cut and nothing below."""
    for row in range(kept.shape[0]):
        for head in range(kept.shape[1]):
            ours, theirs = set(kept[row, head].tolist()), set(reference[row, head].tolist())
            if cut_gap[row, head] > tie:
                assert ours == theirs
                continue
            score = scores[row, head, :competing]
            cut = score[sorted(i for i in theirs if i < competing)].min()
            above = set(torch.nonzero(score > cut + tie).flatten().tolist())
            below = set(torch.nonzero(score < cut - tie).flatten().tolist())
            assert above <= ours and not below & ours and len(ours) == len(theirs)


@pytest.mark.parametrize("path", files("rkv_step_*") + files("rkv_batch_*"), ids=lambda p: p.stem)
def test_rkv_scores_and_choice_match_the_reference(path):
    meta, golden = load(path)
    policy = get("rkv", window=meta["window"], kernel=meta["kernel"], mix=meta["mix_lambda"], threshold=meta["threshold"])
    q, k, v = golden["q"], golden["k"], golden["v"]
    unpooled = decode_importance(q, k)
    torch.testing.assert_close(unpooled, golden["importance_unpooled"], atol=1e-6, rtol=0)
    torch.testing.assert_close(pool(unpooled, meta["kernel"], "max"), golden["importance"], atol=1e-6, rtol=0)
    torch.testing.assert_close(redundancy(k, meta["threshold"]), golden["redundancy_full"], atol=1e-6, rtol=0)
    torch.testing.assert_close(policy.scores(q, k, v), golden["final_score"], atol=1e-6, rtol=0)
    kept = policy.select(q, k, v, meta["budget"])
    assert_kept(kept, golden["kept_sorted"], golden["final_score"], golden["cut_gap"], meta["T"] - meta["window"])


@pytest.mark.parametrize("path", files("rkv_batch_*"), ids=lambda p: p.stem)
def test_rkv_batch_does_not_repeat_the_row_zero_bug(path):
    meta, golden = load(path)
    kept = get("rkv", window=meta["window"]).select(golden["q"], golden["k"], golden["v"], meta["budget"])
    assert not torch.equal(kept, golden["kept_sorted_2025_buggy_batch"])


@pytest.mark.parametrize("path", files("rkv_chain_*"), ids=lambda p: p.stem)
def test_rkv_chain_of_compressions_matches_the_reference(path):
    meta, golden = load(path)
    q_all, k_all = golden["q_all"], golden["k_all"]
    policy = get("rkv", window=meta["window"], kernel=meta["kernel"], mix=meta["mix_lambda"], threshold=meta["threshold"])
    alive = torch.arange(meta["prompt"]).expand(1, meta["Hkv"], meta["prompt"])
    event = 0
    for n in range(1, meta["decode"] + 1):
        now = meta["prompt"] + n
        alive = torch.cat([alive, torch.full((1, meta["Hkv"], 1), now - 1)], dim=-1)
        if n % meta["interval"] == 0 and alive.shape[-1] >= meta["budget"]:
            keys = k_all.gather(2, alive[..., None].expand(-1, -1, -1, meta["D"]))
            kept = policy.select(q_all[:, :, now - meta["window"] : now], keys, keys, meta["budget"])
            alive = alive.gather(-1, kept)
            assert torch.equal(alive[0], golden["kept_position_order"][event])
            event += 1
    assert event == len(golden["kept_position_order"])


@pytest.mark.parametrize("path", files("snapkv_decode_*"), ids=lambda p: p.stem)
def test_snapkv_while_decoding_matches_the_reference(path):
    meta, golden = load(path)
    policy = get("snapkv", window=meta["window"], kernel=meta["kernel"])
    torch.testing.assert_close(policy.scores(golden["q"], golden["k"], golden["v"]), golden["score"], atol=1e-6, rtol=0)
    kept = policy.select(golden["q"], golden["k"], golden["v"], meta["budget"])
    assert_kept(kept, golden["kept_sorted"], golden["score"], golden["cut_gap"], meta["T"] - meta["window"])


@pytest.mark.parametrize("path", files("snapkv_orig_*"), ids=lambda p: p.stem)
def test_snapkv_prefill_form_matches_the_original(path):
    meta, golden = load(path)
    kind = meta["pooling"].removesuffix("pool")
    policy = get("snapkv", window=meta["window"], kernel=meta["kernel"], form="prefill", pool=kind)
    scores = policy.scores(golden["q_window"], golden["k"], golden["v"])
    torch.testing.assert_close(scores, golden["score"], atol=1e-6, rtol=1e-5)
    kept = policy.select(golden["q_window"], golden["k"], golden["v"], meta["max_capacity_prompt"])
    assert_kept(kept, golden["kept_sorted"], golden["score"], golden["cut_gap"], meta["T"] - meta["window"])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("path", files("kvpress_*"), ids=lambda p: p.stem)
def test_policies_match_kvpress(path, layer):
    meta, golden = load(path)
    name = path.stem.split("_")[1]
    q, k, v = (golden[f"{kind}_l{layer}"] for kind in ("q_postrope", "keys", "values"))
    reference = golden[f"score_l{layer}"]
    if name == "snapkv":  # scores only; kvpress takes the mean over the window where the original sums
        policy = get("snapkv", window=meta["window"], kernel=meta["kernel"], form="prefill", pool="avg")
        scores = policy.scores(q[:, :, -meta["window"] :], k, v) / meta["window"]
        torch.testing.assert_close(scores, reference[..., : -meta["window"]], atol=1e-6, rtol=1e-5)
        return
    window = 1 if name == "tova" else 0
    policy = get(name, window=window, sinks=meta.get("n_sink", 0))
    if name != "streaming":  # kvpress marks kept and dropped with 1 and 0 there
        competing = meta["T"] - window
        scores = policy.scores(q[:, :, -1:], k, v)
        torch.testing.assert_close(scores[..., :competing], reference[..., :competing], atol=1e-6, rtol=1e-5)
    kept = policy.select(q[:, :, -1:], k, v, meta["n_kept"])
    # Repeated tokens have keys of equal norm up to rounding, so a tie is a little wider here.
    assert_kept(kept, golden[f"kept_sorted_l{layer}"], reference, golden[f"cut_gap_l{layer}"], meta["T"] - window, tie=1e-6)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("path", files("expected_*"), ids=lambda p: p.stem)
def test_expected_attention_matches_kvpress(path, layer):
    """kvpress has statistics of each row's own queries: here each row is a layer."""
    meta, golden = load(path)
    keys, values, mean, covariance = (golden[f"{kind}_l{layer}"] for kind in ("k", "v", "query_mean", "query_covariance"))
    rotary = Rotary.half_split(2, meta["head_dim"], meta["rope_theta"]).statistics()
    of_model = {
        "layers": torch.tensor([0, 1]),
        "statistics": {"query_mean": mean, "query_covariance": covariance, **rotary},
    }
    for kind, options in (("score", {}), ("score_epsilon", {"epsilon": meta["epsilon"]})):
        policy = get("expected", window=0, future=meta["n_future_positions"], **options)
        scores = policy.scores(None, keys, values, **of_model).exp()
        torch.testing.assert_close(scores, golden[f"{kind}_l{layer}"], atol=1e-6, rtol=1e-4)
        kept = policy.select(None, keys, values, 20, **of_model)
        assert torch.equal(kept, golden[f"{kind}_l{layer}"].topk(20).indices.sort().values)


@pytest.mark.parametrize("path", files("streaming_*"), ids=lambda p: p.stem)
def test_streaming_keeps_the_first_and_the_most_recent(path):
    meta, golden = load(path)
    keys = torch.randn(1, meta["Hkv"], meta["T"], 8)
    assert torch.equal(
        get("streaming", sinks=meta["first_tokens"]).select(None, keys, keys, meta["budget"]), golden["kept_sorted"]
    )
