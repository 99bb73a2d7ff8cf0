"""`Engine` as a library: abort, stream, limits and weights in place, as a custom loop uses them."""

import copy
import runpy
from pathlib import Path

import pytest
import torch

from random_models import random_model
from sparse_rl import KV, Engine, Sampling, UserError, replay

EXAMPLE = Path(__file__).parents[1] / "examples/custom_loop.py"
SMALL = KV(policy="rkv", budget=16, interval=4, window=4, sinks=2, protect_prompt=False)
PROMPTS = [[5, 6], [7, 8, 9]]
FREE = Sampling(max_tokens=40, stop=())


@pytest.mark.parametrize("kv", [SMALL, KV(policy="full"), SMALL.model_copy(update={"protect_prompt": True})])
def test_an_aborted_rollout_keeps_its_tokens_and_changes_no_other(model, kv):
    engine = Engine(model, kv, slots=4)
    whole = engine.generate(PROMPTS, samples=4, sampling=FREE)
    streamed = {}

    def progress(chunk):
        for index, pieces in chunk.new.items():
            streamed.setdefault(index, []).extend(int(token) for piece in pieces for token in piece)
        if len(streamed.get(1, [])) >= 10:
            chunk.abort(1)
            chunk.abort(6)  # waits for a slot

    rollouts = engine.generate(PROMPTS, samples=4, sampling=FREE, progress=progress)
    assert [rollout.finish for rollout in rollouts] == ["length", "abort", *["length"] * 4, "abort", "length"]
    assert 10 <= len(rollouts[1].response) < 40 and len(rollouts[6].response) == 1
    for index, (cut, rollout) in enumerate(zip(rollouts, whole, strict=True)):
        assert cut.response == rollout.response[: len(cut.response)] == streamed[index]
    for ours, rollout in zip(replay(model, rollouts, "sparse"), rollouts, strict=True):
        torch.testing.assert_close(ours.detach(), rollout.logprobs, atol=1e-4, rtol=0)


def test_all_rollouts_may_be_aborted_and_the_engine_goes_on(model):
    engine = Engine(model, SMALL, slots=2)
    whole = engine.generate(PROMPTS, samples=2, sampling=FREE)
    ended = engine.generate(PROMPTS, samples=2, sampling=FREE, progress=lambda chunk: [chunk.abort(each) for each in range(4)])
    assert {rollout.finish for rollout in ended} == {"abort"} and engine.stats.tokens < 80
    again = engine.generate(PROMPTS, samples=2, sampling=FREE)
    assert [rollout.response for rollout in again] == [rollout.response for rollout in whole]


def test_a_rollout_that_ends_with_its_first_token_may_abort_all_others(model):
    aborts = []

    def end_siblings(index, rollout):
        if index == 4:
            for other in (5, 6, 7):
                aborts[-1](other)

    rollouts = Engine(model, SMALL, slots=4).generate(
        PROMPTS,
        samples=4,
        sampling=FREE,
        limits=[9, 9, 9, 9, 1, 40, 40, 40],
        progress=lambda chunk: aborts.append(chunk.abort),
        on_end=end_siblings,
    )
    assert [rollout.finish for rollout in rollouts] == ["length"] * 5 + ["abort"] * 3


def test_an_exception_in_a_callback_ends_the_call_and_not_the_engine(model):
    engine = Engine(model, SMALL, slots=2)

    def progress(chunk):
        raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        engine.generate(PROMPTS, samples=2, sampling=FREE, progress=progress)
    assert len(engine.generate(PROMPTS, samples=2, sampling=FREE)) == 4


def test_weights_are_updated_in_place(model):
    sampler, learner = copy.deepcopy(model), random_model("qwen2", seed=1).double()
    engine = Engine(sampler, SMALL, slots=2)
    places = [weight.data_ptr() for weight in sampler.parameters()]
    engine.update_weights(learner.named_parameters())
    assert [weight.data_ptr() for weight in sampler.parameters()] == places
    theirs = Engine(learner.float(), SMALL, slots=2).generate(PROMPTS, sampling=FREE)
    assert [each.response for each in engine.generate(PROMPTS, sampling=FREE)] == [each.response for each in theirs]
    with pytest.raises(UserError, match=r"The weight model\.other of shape \(3,\) does not exist in the engine's model"):
        engine.update_weights([("model.other", torch.zeros(3))])
    with pytest.raises(UserError, match=r"norm\.weight of shape \(3,\) has shape \(64,\) in the engine's model"):
        engine.update_weights([("model.norm.weight", torch.zeros(3))])


def test_the_example_of_a_custom_loop_runs(capsys, tmp_path):
    """With half of the samples, and a second step for the weights of the first."""
    source, short = EXAMPLE.read_text(), tmp_path / "custom_loop.py"
    assert len(source.splitlines()) <= 60
    assert "SAMPLES, SUMS = 8, 6" in source and "range(3)" in source
    short.write_text(source.replace("SAMPLES, SUMS = 8, 6", "SAMPLES, SUMS = 4, 6").replace("range(3)", "range(2)"))
    runpy.run_path(str(short), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("savings" in line for line in lines)
