"""A custom RL loop on `Engine`: weights in place, streaming, abort and a limit per rollout. Run it: python examples/custom_loop.py"""

import copy

import torch
from torch.nn.utils.rnn import pad_sequence

from sparse_rl import KV, Engine, Sampling, load_model, load_tokenizer, replay
from sparse_rl.data.arithmetic import grade, make_problems
from sparse_rl.learner.correction import correct

SAMPLES, SUMS = 8, 6
tokenizer, sampler = load_tokenizer("tiny"), load_model("tiny")
learner = copy.deepcopy(sampler).float()  # the engine samples from its own copy, in any dtype
optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-4)
engine = Engine(sampler, KV(policy="rkv", budget=40, interval=8), slots=16)


def watch(texts):
    """Return a callback that streams every rollout into `texts` and aborts those that have skipped a line."""

    def progress(chunk):
        for index, pieces in chunk.new.items():
            texts[index] += tokenizer.decode([token for piece in pieces for token in piece], skip_special_tokens=True)
            lines = [line.partition(":")[0] for line in texts[index].split()[1:]]
            if lines[:-1] != [str(SUMS - 1 - number) for number in range(len(lines[:-1]))]:
                chunk.abort(index)

    return progress


for step in range(3):
    problems = make_problems(4, seed=step, sums=SUMS)
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    texts = dict.fromkeys(range(len(prompts) * SAMPLES), "")
    limits = [11 * SUMS - 4 * (index % SAMPLES == 0) for index in texts]  # one limit per rollout, in tokens
    sampling = Sampling(max_tokens=max(limits), temperature=1.5, seed=step)
    rollouts = engine.generate(prompts, SAMPLES, sampling, limits=limits, progress=watch(texts))

    answers = [problem.answer for problem in problems for _ in range(SAMPLES)]
    rewards = torch.tensor([grade(texts[index], answer) for index, answer in enumerate(answers)]).view(-1, SAMPLES)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()

    old = pad_sequence([rollout.logprobs for rollout in rollouts], batch_first=True)
    new = pad_sequence(replay(learner, rollouts, view="dense"), batch_first=True)
    mask = pad_sequence([torch.ones(len(rollout.response)) for rollout in rollouts], batch_first=True)
    corrected = correct(new.detach() - old, mask, preset="paper")
    surrogate = corrected.weights * (new - new.detach()).exp() * advantages[:, None]
    loss = -(surrogate.sum(dim=1) / corrected.divisors).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    engine.update_weights(learner.named_parameters())  # in place: the engine keeps its cache and its graphs
    ends = {end: sum(rollout.finish == end for rollout in rollouts) for end in ("stop", "length", "abort")}
    print(f"step {step}: reward {rewards.mean():.2f}, ended by {ends}, savings {engine.stats.token_savings:.0%}")
