"""Measure how exactly the sampler of a model agrees with the learner's replay, and its dense cache with transformers alone.

`make_models.py` prints the result of every family, and `tests/test_families.py` holds it to `Exactness.bound`.
"""

# R rollouts, T response tokens, V vocabulary

import copy
from dataclasses import dataclass

import torch
from families import WINDOW, build
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sparse_rl import KV, NEVER, Engine, Sampling, replay
from sparse_rl.rollout.rollout import Rollout

KEPT = KV(policy="rkv", budget=16, interval=4, window=4, sinks=2, protect_prompt=False)
SHORT, LONG = [7, 8, 9], list(range(3, 46))
TOKENS = 24
"""Response tokens: with the long prompt five windows, and at least five compactions."""
assert len(LONG) + TOKENS > 5 * WINDOW
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Differences that count as rounding, see `size`."""


@dataclass(frozen=True)
class Gap:
    """A difference between the engine and what it must agree with, beside one between two passes of transformers alone."""

    ours: float
    own: float


@dataclass(frozen=True)
class Exactness:
    dtype: torch.dtype
    replayed: dict[str, Gap]
    """Log-probs of the sampler and of the learner's replay: one rollout per pass, packed, and of a dense cache."""
    dense: Gap
    """Log-probs of `kv.policy = "full"` and of `generate`."""
    states: dict[str, Gap]
    """Recurrent states after the last token, of `kv.policy = "full"` and of `generate`: the norm of the difference over theirs."""
    without_evictions: float
    """Difference if the replay keeps all keys. It shows what a wrong eviction would do."""
    compactions: int
    """Smallest number of compactions of a layer that evicts, in a rollout of the long prompt; 0 if none evicts."""

    def bound(self, gap: Gap) -> float:
        """Return the largest difference allowed: rounding, or half more than that of transformers' cached and parallel passes."""
        return max(ROUNDING[self.dtype], 1.5 * gap.own)

    @property
    def of_replay(self) -> float:
        return max(gap.ours for gap in self.replayed.values())

    @property
    def cell(self) -> str:
        return short(self.of_replay)


def measure(config: PreTrainedConfig, dtype: torch.dtype) -> Exactness:
    model = build(config).to(dtype)
    plain = copy.deepcopy(model)
    sampling = Sampling(max_tokens=TOKENS, stop=())
    engine = Engine(model, KEPT, slots=4)
    rollouts = engine.generate([SHORT, LONG], 2, sampling)
    dense = Engine(model, KV(policy="full"), slots=2)
    full = dense.generate([LONG], 2, sampling)
    cached, parallel = own_passes(plain, full)
    own = size(cached.logprobs - parallel.logprobs, dtype)
    states = {
        f"{name} of layer {layer}": Gap(
            relative(tensor, cached.state(layer, name)), relative(parallel.state(layer, name), cached.state(layer, name))
        )
        for layer, held in (dense.cache.states.of_layer if dense.cache.states else {}).items()
        for name, tensor in held.items()
    }
    with torch.no_grad():
        replayed = {
            name: Gap(apart(replay(model, rollouts, "sparse", tokens_per_pass=count), rollouts, dtype), own)
            for name, count in (("unpacked", 1), ("packed", 4096))
        }
        replayed["dense cache"] = Gap(apart(replay(model, full, "sparse"), full, dtype), own)
        without_evictions = apart(replay(model, rollouts, "dense"), rollouts, dtype)
    return Exactness(
        dtype,
        replayed,
        Gap(size(torch.stack([each.logprobs for each in full]) - cached.logprobs, dtype), own),
        states,
        without_evictions,
        min((compactions(rollouts[-1], layer) for layer in engine.limits.shape.full_layers), default=0),
    )


def short(value: float) -> str:
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def size(differences: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference in float32. In bfloat16, return the mean without the largest tenth, because rounding lets a
    router choose another expert for a token now and then."""
    sorted_n = differences.abs().flatten().sort().values
    return float(sorted_n[-1] if dtype == torch.float32 else sorted_n[: len(sorted_n) * 9 // 10].mean())


def apart(logprobs: list[Tensor], rollouts: list[Rollout], dtype: torch.dtype) -> float:
    return size(torch.cat(logprobs) - torch.cat([rollout.logprobs for rollout in rollouts]), dtype)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def compactions(rollout: Rollout, layer: int) -> int:
    times = rollout.evicted_at[layer]
    return len(times[times != NEVER].unique())


@dataclass(frozen=True)
class OwnPass:
    """A pass of transformers over rollouts of one prompt."""

    logprobs: Tensor
    cache: object

    def state(self, layer: int, name: str) -> Tensor:
        return getattr(self.cache.layers[layer], name)[0]  # type: ignore[attr-defined]


@torch.no_grad()
def own_passes(model: PreTrainedModel, rollouts: list[Rollout]) -> tuple[OwnPass, OwnPass]:
    """Run rollouts through transformers alone: `generate` made to choose their tokens, with its cache, and one parallel pass."""
    start = len(rollouts[0].prompt)
    tokens_RT = torch.tensor([rollout.response for rollout in rollouts])
    out = model.generate(
        torch.tensor([rollout.prompt for rollout in rollouts]),
        prefix_allowed_tokens_fn=lambda row, seen: [int(tokens_RT[row, len(seen) - start])],
        max_new_tokens=tokens_RT.shape[1],
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    fed = model(out.sequences[:, :-1], use_cache=True)
    return (
        OwnPass(chosen(torch.stack(out.logits, dim=1), tokens_RT), out.past_key_values),
        OwnPass(chosen(fed.logits[:, start - 1 :], tokens_RT), fed.past_key_values),
    )


def chosen(logits_RTV: Tensor, tokens_RT: Tensor) -> Tensor:
    return logits_RTV.float().log_softmax(dim=-1).gather(-1, tokens_RT[..., None])[..., 0]
