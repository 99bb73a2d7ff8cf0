"""Write docs/models.md: measure every model family on a small random model, and record the reason of each refusal.

python docs/make_models.py

To add a family, add its configuration to `families.py`. `tests/test_model_table.py` checks each row again, and
`tests/test_families.py` measures its differences.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exactness
import torch
from families import BUDGET, REFUSED, RUNS, WINDOW, build
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparse_rl import KV, Engine, Sampling, UserError, replay
from sparse_rl.config import LoraConfig
from sparse_rl.integrations.transformers import BoundedCache
from sparse_rl.kv.shape import CacheShape
from sparse_rl.models.actor import Actor
from sparse_rl.models.compile import decoder_layers
from sparse_rl.plan.dimensions import from_config
from sparse_rl.rollout.rollout import Rollout
from sparse_rl.sizes import token_bytes, window_bytes

PAGE = Path(__file__).parent / "models.md"
KEPT = KV(policy="rkv", budget=BUDGET, interval=8, window=4, sinks=2, protect_prompt=False)
PROMPTS = [[7, 8, 9], list(range(3, 31))]
TOKENS = 48
"""Response tokens: more than three windows, with compactions of the prompt and the response."""
EXACT = 1e-4
"""Largest difference of log-probs that counts as rounding in float32."""
YES = "yes"
HEAD = """\
# Models

`sparse-rl` supports these families. The engine [checks](api.md#which-models) your own model before its first rollout. The last columns are differences between
the log-probs of sampler and learner ([columns and checks](#how-the-table-is-measured)).
"""
LEGEND = f"""\
## How the table is measured

`python docs/make_models.py` writes this page from small models with random weights and windows of {WINDOW} tokens. Every family passes these checks in float32, unless
its second column names one:

1. **Gradient**: the gradient of packed rollouts equals that of transformers, one rollout at a time.
2. **Plan**: `sparse-rl plan` counts weights, adapters, keys, windows and recurrent states exactly.
3. **Export**: the saved model loads in transformers with the same weights.
4. **BoundedCache**: `generate` in transformers gives the engine's greedy rollouts, with the same log-probs.
5. **FSDP**: every decoder layer is found, to be sharded on its own.

Other columns:

- **LoRA**: the layers that `all-linear` adapts. *Attention* is q, k, v and o; *all* is also gate, up and down. The merged model samples as the adapted one.
- **float32**: the largest difference between the log-probs of the sampler and of the learner's replay under the same evictions
  (prompts of {len(exactness.SHORT)} and {len(exactness.LONG)} tokens, responses of {exactness.TOKENS}, R-KV {exactness.KEPT.budget} + {exactness.KEPT.interval} and no eviction).
- **bfloat16**: the mean of these differences on a CPU, without the largest tenth, where rounding may let a router choose another expert.

Tests bound the differences by {" and ".join(map(exactness.short, exactness.ROUNDING.values()))}, or by 1.5 times the difference between the cached and the parallel pass of transformers alone
(`tests/test_families.py`). The same bounds apply between `kv.policy = "full"` and `generate` in transformers.
"""


@dataclass
class Row:
    """One family."""

    family: str
    layers: str
    checks: dict[str, str]
    """Result of each check."""
    lora: str

    @property
    def cells(self) -> tuple[str, ...]:
        failed = [f"{name}: {result}" for name, result in self.checks.items() if result != YES]
        return (self.family, "; ".join([self.layers, *failed]), self.lora)


HEADINGS = ("family", "attention and MLP", "LoRA", "float32", "bfloat16")
ATTENTION = ["k", "o", "q", "v"]
COMMON_NAMES = {tuple(ATTENTION): "attention", tuple(sorted([*ATTENTION, "gate", "up", "down"])): "all"}
"""Names of common sets of adapted layers in the table."""


def page() -> str:
    rows = [line((*row(name).cells, *measured(name))) for name in RUNS]
    table = [line(HEADINGS), f"|{'---|' * len(HEADINGS)}", *rows]
    refused = ["| family | reason |", "|---|---|", *(f"| {name} | {refusal(name)} |" for name in REFUSED)]
    return "\n".join([HEAD, *table, "\n## Refused\n", *refused, "", LEGEND, "## Decode speed\n", SPEED, "## Notes\n", NOTES])


SPEED = """\
Random weights, 28 layers of Qwen2.5-1.5B's width, 256 slots, prompts of 256 tokens, 2,048 sampled tokens, bfloat16, H200
(`python benchmarks/families.py`, [JSON](../benchmarks/results/families.json)):

| layers | dense cache, whole call, tok/s | R-KV 512 + 128, whole call, tok/s | KV cache and states, GB |
|---|---|---|---|
| full attention (Qwen2.5) | 48,528 | 72,972 | 16.2 dense, 4.7 R-KV |
| five of six with a window of 1,024 tokens (Gemma 3) | 58,522 | 62,286 | 8.8, 7.1 |
| three of four Gated DeltaNets (Qwen3.5; 1.8 billion weights) | 18,581 | 20,067 | 10.0, 7.1 |

A bounded cache gains little where few layers attend to all tokens. The hybrid is slower than the attention model (measured on another H200, without causal-conv1d).
"""

NOTES = """\
- Routers, stacked experts and the output projections of Mamba layers get no adapter. In a model with experts, neither do gate, up and down.
- Nemotron-H, Granite 4, GPT-2 and OPT have no rotary positions, which the default policy `triattention` needs. Set `kv.policy` to `streaming` or `rkv`.
- gpt-oss is published in MXFP4. Loading expands the weights to `model.dtype`, and they are saved in it.
- The first run of a Gated DeltaNet model compiles and tunes kernels for more than three minutes (H200). The results are cached.
- Gemma 3n and Gemma 4 have run on a GPU only as small random models.
- Soft caps and learned sinks run in FlexAttention on a GPU. Rollouts then do not share their prompt in the learner.
- Small Qwen3.5- and gpt-oss-like models [learn the embedded task](../experiments/RESULTS.md#families-trained), from 35 to 63 and 65 % (one seed).
"""


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def measured(name: str) -> list[str]:
    return [exactness.measure(RUNS[name], dtype).cell for dtype in exactness.ROUNDING]


def row(name: str) -> Row:
    """Measure a family."""
    model = build(RUNS[name])
    plain = copy.deepcopy(model)
    engine = Engine(model, KEPT, slots=3)
    rollouts = engine.generate(PROMPTS, 2, Sampling(max_tokens=TOKENS, stop=()))
    checks = {
        "gradient": attempt(lambda: same_gradient(model, plain, rollouts)),
        "plan": attempt(lambda: planned(plain, engine.limits.shape)),
        "export": attempt(lambda: exported(plain)),
        "BoundedCache": attempt(lambda: bounded_cache(model)),
        "FSDP": sharded_layers(model),
    }
    return Row(name, features(model, engine), checks, attempt(lambda: adapters(plain)))


def refusal(name: str) -> str:
    try:
        Engine(build(REFUSED[name]), KEPT, slots=1)
    except UserError as error:
        return str(error).partition(", which is not supported")[0].removesuffix(": use another model.").replace("|", "\\|")
    raise AssertionError(f"{name} is not refused")


def attempt(check: Callable[[], str]) -> str:
    try:
        return check()
    except (UserError, NotImplementedError):
        return "no"


def gaps(logprobs: list[Tensor], rollouts: list[Rollout]) -> list[float]:
    pairs = zip(logprobs, rollouts, strict=True)
    return [float((ours.detach() - rollout.logprobs).abs().max()) for ours, rollout in pairs]


def features(model: PreTrainedModel, engine: Engine) -> str:
    """Return what the model's layers have, as its attention calls and its configuration show."""
    config, limits = model.config.get_text_config(), engine.limits
    count, full = len(limits.shape.windowed), limits.shape.full.layers
    found = ["windows" if not full else "windows in some layers" if count else "full attention"]
    if limits.shape.readers:
        found.append("layers without own keys")
    if getattr(config, "attn_logit_softcapping", None):
        found.append("soft caps")
    if any(path.endswith("sinks") for path, _ in model.named_parameters()):
        found.append("sinks")
    if limits.shape.states:
        found.append("recurrent layers")
    if limits.sliding_window:
        found.append("mask limits the length")
    if experts(model):
        found.append("experts")
    return ", ".join(found)


def experts(model: PreTrainedModel) -> bool:
    return any(path.rsplit(".", 1)[-1] == "experts" for path, _ in model.named_modules())


def own_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    tokens = torch.tensor([rollout.prompt + rollout.response])
    logits = model(tokens, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[0, len(rollout.prompt) :, None])[:, 0]


def same_gradient(model: PreTrainedModel, plain: PreTrainedModel, rollouts: list[Rollout]) -> str:
    """Compare the gradient of one packed pass with that of transformers."""
    reference = copy.deepcopy(plain)
    torch.stack([own_logprobs(reference, rollout).sum() for rollout in rollouts]).sum().backward()
    model.zero_grad()
    torch.stack([each.sum() for each in replay(model, rollouts, "dense")]).sum().backward()
    for (path, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if (ours.grad is None) != (theirs.grad is None):
            return f"differs in {path}"
        if ours.grad is not None and theirs.grad is not None:
            tolerance = 1e-3 * float(theirs.grad.abs().max()) + 1e-6
            if not torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=tolerance):
                return f"differs in {path}"
    model.zero_grad()
    return YES


def adapters(plain: PreTrainedModel) -> str:
    """Train adapters for a step, and compare the merged sampler with the learner."""
    actor = Actor(copy.deepcopy(plain), LoraConfig(rank=2))
    names = {path.rsplit(".", 1)[-1] for path, module in actor.learner.named_modules() if hasattr(module, "get_delta_weight")}
    trained = [weight for weight in actor.learner.parameters() if weight.requires_grad]
    engine = Engine(actor.sampler, KEPT, slots=2)
    rollouts = engine.generate(PROMPTS, 1, Sampling(max_tokens=8, stop=()))
    for _ in range(2):  # the first step leaves one factor at zero
        torch.cat(replay(actor.learner, rollouts, "dense")).sum().backward()
        with torch.no_grad():
            for weight in trained:
                assert weight.grad is not None
                weight -= 1e-2 * weight.grad
                weight.grad = None
    before = rollouts
    actor.sync()
    rollouts = engine.generate(PROMPTS, 1, Sampling(max_tokens=TOKENS, stop=()))
    if max(gaps(replay(actor.learner, rollouts, "sparse"), rollouts)) > EXACT:
        return "the merged model differs"
    moved = max(gaps(replay(actor.sampler, before, "sparse"), before))
    names = {name if name == "c_proj" else name.removesuffix("_proj") for name in names}
    if moved <= EXACT:
        return "adapters are not trained"
    return COMMON_NAMES.get(tuple(sorted(names)), " ".join(sorted(names)))


def sharded_layers(model: PreTrainedModel) -> str:
    found, there = len(decoder_layers(model)), model.config.get_text_config().num_hidden_layers
    return YES if found == there else f"{found} of {there} layers found"


def planned(plain: PreTrainedModel, shape: CacheShape) -> str:
    """Compare the plan's counts with those of the model and its engine."""
    dims = from_config(plain.config.get_text_config().to_dict(), "the model")
    adapted = Actor(copy.deepcopy(plain), LoraConfig(rank=2, merge=False)).learner
    counts = {
        "weights": (dims.params, sum(weight.numel() for weight in plain.parameters())),
        "adapters": (
            dims.adapter_params("all-linear", 2),
            sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad),
        ),
        "keys": (token_bytes(dims.full, 4), token_bytes(shape.full, 4)),
        "windows": (window_bytes(dims, TOKENS, 4), window_bytes(shape, TOKENS, 4)),
        "states": (dims.state_bytes(4), shape.state_bytes),
    }
    wrong = [f"{ours} instead of {theirs} {name}" for name, (ours, theirs) in counts.items() if ours != theirs]
    return f"no: {', '.join(wrong)}" if wrong else YES


def exported(plain: PreTrainedModel) -> str:
    """Save the model that samples, and load it again."""
    actor = Actor(copy.deepcopy(plain), LoraConfig())
    with tempfile.TemporaryDirectory() as folder:
        actor.sampler.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine, loaded = plain.state_dict(), again.state_dict()
    same = mine.keys() == loaded.keys() and all(torch.equal(mine[name], loaded[name]) for name in mine)
    return YES if same else "the loaded weights differ"


def bounded_cache(model: PreTrainedModel) -> str:
    rollouts = Engine(model, KEPT, slots=2).generate(PROMPTS, 1, Sampling(max_tokens=TOKENS, stop=(), temperature=0))
    longest = max(map(len, PROMPTS))
    tokens, mask = torch.zeros(2, len(PROMPTS), longest, dtype=torch.long)
    for place, prompt in enumerate(PROMPTS):
        tokens[place, -len(prompt) :], mask[place, -len(prompt) :] = torch.tensor(prompt), 1
    cache = BoundedCache("rkv", KEPT.kept_tokens, interval=KEPT.interval, window=KEPT.recent, sinks=KEPT.sinks)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    out: Any = model.generate(tokens, attention_mask=mask, past_key_values=cache, **options)
    responses = out.sequences[:, longest:]
    if responses.tolist() != [rollout.response for rollout in rollouts]:
        return "the tokens differ"
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    gap = max(gaps(list(logprobs), rollouts))
    return YES if gap < EXACT else f"log-probs differ by {gap:.0e}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
