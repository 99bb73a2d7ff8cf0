"""`experiments/quantized_accuracy.py` samples in the cache that `experiments/quantize.py` measures, and as one call of `generate` does."""

from pathlib import Path

import pytest
import torch

from sparse_rl import load_model
from sparse_rl.models.support import prepare

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.mark.parametrize("scheme", ["K8 channel x token V8 token", "K4 pair V4 group 32"])
def test_a_sampled_token_has_the_logprob_of_the_teacher_forced_pass(scheme, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    from quantize import Answer, decoder_pass, logprobs, view_of
    from quantized_accuracy import STORAGES, Calibration, QuantisedCache

    model = load_model("tiny", dtype="float32", device="cpu")
    prepare(model)
    tokens = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    answer, calibration = Answer("single", tokens[0, :10].tolist(), tokens[0, 10:].tolist()), Calibration()
    decoder_pass(model, answer, calibration)
    expected, exact = (logprobs(model, answer, view_of(name, answer, calibration)) for name in (scheme, "dense"))
    model.set_attn_implementation("sdpa")
    cache = QuantisedCache(STORAGES[scheme], calibration, model.config)
    with torch.no_grad():
        steps = [tokens[:, :10], *tokens[:, 10:39].split(1, dim=1)]
        logits = torch.cat([model(step, past_key_values=cache).logits[0, -1:] for step in steps])
    found = logits.log_softmax(-1).gather(1, tokens[0, 10:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert (expected - exact).abs().max() > 0.1


def test_answers_are_those_of_a_single_call_of_generate(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import quantized_accuracy
    from quantized_accuracy import DynamicCache, generated

    piece = 16
    monkeypatch.setattr(quantized_accuracy, "PIECE", piece)
    model = load_model("tiny", dtype="float32", device="cpu")
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, []
    rows = torch.randint(8, 60, (24, 9), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [row[: 4 + index % 5] for index, row in enumerate(rows)]
    longest = 2 * piece + 10
    whole = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=longest, do_sample=False)
        whole.append(made[0, len(prompt) :].tolist())
    end = whole[0][10]
    model.generation_config.eos_token_id = end
    found = generated(model, prompts, DynamicCache(config=model.config), longest, do_sample=False)
    assert found == [row[: row.index(end)] if end in row else row for row in whole]
    lengths = sorted(map(len, found))
    assert lengths[0] < piece and lengths[-1] == longest
