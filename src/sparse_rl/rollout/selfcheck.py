"""Check that a model gives the same log-probs with and without our attention views. Runs once, when an engine is built.

Attention shapes do not reveal every difference. A model may mix tokens outside attention, apply its own mask, or derive
positions from the row index instead of the position ids. The check runs a small float32 stand-in with one layer of each kind.
It compares packed sequences as in the learner, prompts and decode steps as in the sampler, and a token far into a sequence.

This is the last of the three checks listed in `models/support.py`. It is in this package because it runs the sampler's steps.
"""

# N packed tokens, V vocabulary

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..errors import UserError, first_line
from ..kernels.attention import packed_causal_attention
from ..kernels.form import PLAIN
from ..kv.cache import SlotCache
from ..kv.policies import get
from ..kv.schedule import DENSE
from ..kv.shape import CacheShape
from ..kv.windows import WindowStore
from ..models.attention import eval_mode, run
from ..models.head import hidden_states
from ..models.recurrent import Mixer, run_packed
from ..models.reduced import ROWS, reduced
from ..models.support import AttentionLimits, head_of, prepare
from .decode import DecodeView
from .prefill import PromptInSlots, prefill

LENGTHS = (256, 37, 13)
"""Lengths of the packed sequences in tokens."""
DECODED = 4
"""Number of final tokens of each sequence that are fed one at a time."""
DEEP = 8256
"""Length of the long sequence whose last token is checked. Llama-4 changes its attention at 8192 tokens."""
MAX_GAP_FLOAT32 = 1e-4
"""Largest allowed difference of log-probs in float32, in standard deviations of the logits. Rounding in one layer gives
1e-6."""
MAX_GAP_HALF = 0.25
"""The same limit in half precision, for a model without a stand-in, which is checked as a whole."""
ROUNDING = 10
"""Tolerated multiple of the model's own rounding error, which is the difference between one pass and single steps with the
model's own cache. Large activations (Qwen2.5) amplify rounding a hundredfold."""
MAX_TOLERANCE = 3e-3
"""Upper limit of that tolerance. A model with a larger rounding error cannot be checked."""
SEEDS = 2
"""Number of random token draws, of which one must pass. Rounding may route a token to another expert."""

_passed: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, torch.device]] = WeakKeyDictionary()


def check_model(model: PreTrainedModel, limits: AttentionLimits) -> None:
    """Raise if the model's log-probs through our views differ from its own. Runs once per model and device."""
    place = (limits.shape.dtype, limits.shape.device)
    if _passed.get(model) == place:
        return
    try:
        stand_in, max_gap = reduced(model), MAX_GAP_FLOAT32
        prepare(stand_in)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's modules cannot be separated, or do not run separately
        if isinstance(error, UserError) and error.__cause__ is None:
            raise  # the layers break a rule, so the whole model does too
        stand_in = model
        max_gap = MAX_GAP_FLOAT32 if limits.shape.dtype == torch.float32 else MAX_GAP_HALF
    with torch.no_grad(), _exact_products(), eval_mode(stand_in):
        try:
            gap = _smallest_gap(stand_in, limits, max_gap)
            head_of(stand_in)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UserError(
                f"{type(model).__name__} fails when it decodes step by step ({first_line(error)}), so it is not supported: "
                "use another model."
            ) from error
    if gap is not None:
        raise UserError(
            f"{type(model).__name__} is not supported: its log-probs differ by up to {gap:.2g} between one pass and "
            "step-by-step decoding, so it depends on more than cached keys. Use another model."
        )
    _passed[model] = place


def _smallest_gap(model: PreTrainedModel, limits: AttentionLimits, max_gap: float) -> float | None:
    """Return None if the two log-probs agree, else the smallest difference of log-probs over the seeds."""
    gaps = []
    for seed in range(SEEDS):
        gap, spread, rounding = _compare(model, limits, seed, max_gap)
        if not gap <= max(max_gap, min(ROUNDING * rounding, MAX_TOLERANCE)) * spread:
            gaps.append(gap)
        else:
            return None
    return min(gaps)


def _compare(model: PreTrainedModel, limits: AttentionLimits, seed: int, max_gap: float) -> tuple[float, float, float]:
    """Return (largest difference of log-probs, standard deviation of the logits, the model's own rounding error in units of
    that standard deviation)."""
    shape = replace(prepare(model).shape, dtype=model.dtype)
    room = min(limit for limit in (limits.context, limits.sliding_window, DEEP) if limit)
    draw = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(min(limits.vocab, ROWS), (min(length, room),), generator=draw).tolist() for length in LENGTHS]
    own = [model(_row(model, tokens), use_cache=False).logits[0].float() for tokens in sequences]
    if not all(bool(each.isfinite().all()) for each in own):
        raise UserError("The model's logits are not finite, so its weights are broken: use an earlier checkpoint.")
    spread = float(torch.cat(own).std(dim=-1).mean())
    pairs = [
        *zip(own, _packed(model, sequences), strict=True),
        *zip((each[_prompt_tokens(each) - 1 :] for each in own), _sampled(model, shape, sequences), strict=True),
    ]
    gap = max(_gap(*pair) for pair in pairs)
    if gap <= MAX_TOLERANCE * spread and _caches_plain_keys(model, shape):
        gap = max(gap, _gap(*_deep(model, shape, room, draw)))
    rounding = (
        _gap(own[0][_prompt_tokens(own[0]) - 1 :], _step_by_step(model, sequences[0])) if gap > max_gap * spread else 0.0
    )
    return gap, spread, rounding / spread


def _gap(left_NV: Tensor, right_NV: Tensor) -> float:
    return float((left_NV.float().log_softmax(-1) - right_NV.float().log_softmax(-1)).abs().max())


def _prompt_tokens(tokens) -> int:
    """Return the number of tokens of a sequence that belong to the prompt."""
    return max(1, len(tokens) - DECODED)


def _row(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return torch.tensor([tokens], device=model.device)


class _Packed:
    """Attention view of a dense replay: sequences packed in one row, each attending only to itself."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        self.longest = max(lengths)

    def attend(self, layer, queries_1QND, keys_1HND, values_1HND, scale, mask, form=PLAIN):
        return packed_causal_attention(queries_1QND, keys_1HND, values_1HND, self.bounds, self.longest, scale, form)

    def recur(self, layer: int, mixer: Mixer, hidden_1ND: Tensor) -> Tensor:
        return run_packed(mixer, hidden_1ND, self.bounds.tolist())


def _packed(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Return the logits of all tokens, computed as in the learner: hidden states times LM head."""
    lengths = [len(tokens) for tokens in sequences]
    tokens_1N = _row(model, [token for tokens in sequences for token in tokens])
    positions_1N = _row(model, [position for length in lengths for position in range(length)])
    view = _Packed(lengths, model.device)
    head = model.get_output_embeddings()
    if hasattr(head, "get_delta_weight"):  # an adapter on the head, which the learner does not support
        return list(run(model, tokens_1N, positions_1N, view, keep=0)[0].split(lengths))
    every_N = torch.arange(sum(lengths), device=model.device)
    hidden_ND = hidden_states(model, tokens_1N, positions_1N, view, every_N)
    return list(head_of(model)(hidden_ND).split(lengths))


def _sampled(model: PreTrainedModel, shape: CacheShape, sequences: list[list[int]]) -> list[Tensor]:
    """Return the logits from the last prompt token on, computed as in the sampler: packed prompts, then one token of each
    sequence per step."""
    cache = _cache(shape, len(sequences), max(map(len, sequences)))
    prompts = [PromptInSlots(tokens[: _prompt_tokens(tokens)], [slot], [0]) for slot, tokens in enumerate(sequences)]
    logits_SV, *_ = prefill(model, cache, get("full"), DENSE, prompts)
    rows = [logits_SV]
    lengths = torch.tensor([len(prompt.prompt) for prompt in prompts], device=model.device)
    rest = torch.tensor([tokens[_prompt_tokens(tokens) :] for tokens in sequences], device=model.device)
    for step in range(rest.shape[1]):
        longest = max(map(len, sequences)) - rest.shape[1] + step + 1
        rows.append(_decode(model, cache, rest[:, step], lengths + step, longest))
    return list(torch.stack(rows, dim=1))


def _cache(shape: CacheShape, slots: int, longest: int) -> SlotCache:
    cache = SlotCache(shape, slots, longest)
    cache.windows = WindowStore(shape, slots, longest) if shape.windowed else None
    return cache


def _decode(model: PreTrainedModel, cache: SlotCache, tokens_S: Tensor, positions_S: Tensor, longest: int) -> Tensor:
    view = DecodeView(cache, positions_S, cache.lengths_S[: len(tokens_S)], longest=longest, kernels=False)
    logits_SV = run(model, tokens_S[:, None], positions_S[:, None], view, keep=1)[:, -1]
    view.advance()
    return logits_SV


def _own_cache(model: PreTrainedModel, shape: CacheShape) -> DynamicCache:
    """Return an empty transformers cache. Without a configuration it holds all keys, and no states."""
    return DynamicCache(config=model.config) if shape.states else DynamicCache()


def _caches_plain_keys(model: PreTrainedModel, shape: CacheShape) -> bool:
    """Return whether the model caches its keys. Some models cache a compressed form and compute keys from it."""
    cache = _own_cache(model, shape)
    model(_row(model, [0]), past_key_values=cache, use_cache=True)
    heads = ((layer, _heads(shape, layer)) for layer in shape.layers_with_keys)
    return all(cache.layers[layer].keys.shape == (1, kv_heads, 1, dim) for layer, (kv_heads, dim) in heads)


def _heads(shape: CacheShape, layer: int) -> tuple[int, int]:
    """Return (kv heads, head dimension) of a layer."""
    of_kind = shape.local if layer in shape.windowed else shape
    return of_kind.kv_heads, of_kind.head_dim


def _deep(model: PreTrainedModel, shape: CacheShape, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the logits of the last token of a long sequence with random keys, from the model itself and through our view."""
    cache, own = _cache(shape, 1, tokens), _own_cache(model, shape)
    for layer in shape.layers_with_keys:
        kv_heads, dim = _heads(shape, layer)
        keys, values = (
            torch.randn(1, kv_heads, tokens - 1, dim, generator=draw).to(shape.device, shape.dtype) for _ in range(2)
        )
        own.update(keys, values, layer)
        if layer in shape.windowed:
            assert cache.windows is not None
            cache.windows.extend(layer, 0, 0, keys, values)
            continue
        index = cache.index_of_layer[layer]
        cache.keys_LSHCD[index, :, :, : tokens - 1], cache.values_LSHCD[index, :, :, : tokens - 1] = keys, values
    cache.lengths_S.fill_(tokens - 1)
    token = torch.zeros(1, dtype=torch.long, device=shape.device)
    theirs = model(token[None], past_key_values=own, use_cache=True).logits[:, -1]
    return theirs, _decode(model, cache, token, token + tokens - 1, tokens)


def _step_by_step(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the same logits as `_sampled` for one sequence, computed with the model's own cache."""
    out = model(_row(model, tokens[: _prompt_tokens(tokens)]), use_cache=True)
    rows = [out.logits[0, -1]]
    for token in tokens[_prompt_tokens(tokens) :]:
        out = model(_row(model, [token]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Disable TF32, which would hide differences that float32 shows."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
