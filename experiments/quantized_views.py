"""Views of a teacher-forced pass: keys and values stored in few bits, and R-KV as the sampler runs it. For `quantize.py`."""

# T tokens of one answer, Q query heads, H kv heads, K held keys, N dropped keys, D head dimension

from dataclasses import dataclass, field

import torch
from quantized_formats import E4M3, Candidate, dequantised, pair_range, widened
from torch import Tensor

from sparse_rl import KV
from sparse_rl.kernels.attention import causal_attention, shadow_attention
from sparse_rl.kv.policies import from_settings
from sparse_rl.kv.quantize import INT4, INT8, Range, channel_range
from sparse_rl.kv.schedule import Schedule
from sparse_rl.kv.trace import NEVER

TOKEN8, TOKEN_E4M3 = Candidate(INT8), Candidate(E4M3)
STATIC8, STATIC_E4M3, STATIC4 = (Candidate(format, tokens=None, channels=1) for format in (INT8, E4M3, INT4))
VALUES4 = Candidate(INT4, channels=32, symmetric=False)


@dataclass(frozen=True)
class Storage:
    """How keys and values are stored. None is bfloat16."""

    keys: Candidate | None
    values: Candidate | None
    statistic: str = "pair"
    """Range of the static scales of keys: of a rotary `pair` of channels, or of a `channel`."""
    widened: float = 1.0
    """Width of that range relative to the calibrated one."""

    def share(self, dim: int) -> float:
        """Return the bytes of a token relative to bfloat16."""
        return sum(2 * dim if each is None else each.bytes_per_token(dim) for each in (self.keys, self.values)) / (4 * dim)


def block(format, tokens: int, symmetric: bool) -> Candidate:
    return Candidate(format, tokens, channels=1, symmetric=symmetric)


def equalised(channels: int) -> Candidate:
    """Return static scales of channels, and within them a scale and a centre per token and group of channels."""
    return Candidate(INT4, channels=channels, symmetric=False, equalised=True)


def four_bit_keys(channels: int) -> Candidate:
    """Return the keys of `kv.dtype = 4bit`: static scales of channels, and a scale per token and group of channels."""
    return Candidate(INT4, channels=channels, equalised=True)


STORAGES = {
    "K16 V16": Storage(None, None),
    "K16 V8 token": Storage(None, TOKEN8),
    "K8 token V8 token": Storage(TOKEN8, TOKEN8),
    "K8 token V8 token, e4m3": Storage(TOKEN_E4M3, TOKEN_E4M3),
    "K8 block 64 V8 token": Storage(block(INT8, 64, True), TOKEN8),
    "K8 pair V8 token": Storage(STATIC8, TOKEN8),
    "K8 channel x token V8 token": Storage(Candidate(INT8, equalised=True), TOKEN8, "channel"),
    "K8 channel + 50 % V8 token": Storage(Candidate(INT8, tokens=None, channels=1, symmetric=False), TOKEN8, "channel", 1.5),
    "K8 channel V8 token": Storage(Candidate(INT8, tokens=None, channels=1, symmetric=False), TOKEN8, "channel"),
    "K8 pair V8 token, e4m3": Storage(STATIC_E4M3, TOKEN_E4M3),
    "K8 pair V8 channel": Storage(STATIC8, STATIC8),
    "K8 pair V4 group 32": Storage(STATIC8, VALUES4),
    "K8 pair V4 group 32, symmetric": Storage(STATIC8, Candidate(INT4, channels=32)),
    "K4 block 32 V4 group 32": Storage(block(INT4, 32, False), VALUES4),
    "K4 block 64 V4 group 32": Storage(block(INT4, 64, False), VALUES4),
    "K4 block 32 V4 group 32, symmetric": Storage(block(INT4, 32, True), Candidate(INT4, channels=32)),
    "K4 pair V4 group 32": Storage(STATIC4, VALUES4),
    "K4 channel x token 32 V4 group 32": Storage(equalised(32), VALUES4, "channel"),
    "K4 channel x token 16 V4 group 32": Storage(equalised(16), VALUES4, "channel"),
    "K4 channel x token 32 V4 group 32, symmetric": Storage(four_bit_keys(32), Candidate(INT4, channels=32), "channel"),
    "K4 channel x token 16 V4 group 16, symmetric": Storage(four_bit_keys(16), Candidate(INT4, channels=16), "channel"),
}


@dataclass
class Calibration:
    """Attend causally and record the ranges of keys (by pair and by channel) and values (by channel) of every layer."""

    ranges: dict[str, dict[int, Range]] = field(default_factory=lambda: {"pair": {}, "channel": {}, "values": {}})

    def attend(self, layer, queries_1QTD, keys_1HTD, values_1HTD, scale, mask, form=None):
        found = {"pair": pair_range(keys_1HTD), "channel": channel_range(keys_1HTD), "values": channel_range(values_1HTD)}
        for name, new in found.items():
            ranges = self.ranges[name]
            ranges[layer] = ranges[layer].union(new) if layer in ranges else new
        return causal_attention(queries_1QTD, keys_1HTD, values_1HTD, scale=scale)

    def tensors(self) -> dict[str, dict[int, tuple[Tensor, Tensor]]]:
        """Return the ranges as plain tuples, for a file."""
        return {name: {layer: tuple(each) for layer, each in ranges.items()} for name, ranges in self.ranges.items()}

    @classmethod
    def of(cls, tensors: dict[str, dict[int, tuple[Tensor, Tensor]]]) -> "Calibration":
        return cls({name: {layer: Range(*each) for layer, each in ranges.items()} for name, ranges in tensors.items()})


class Causal:
    kept_share = 1.0

    def attend(self, layer, queries_1QTD, keys_1HTD, values_1HTD, scale, mask, form=None):
        return causal_attention(queries_1QTD, keys_1HTD, values_1HTD, scale=scale)


class Evicting:
    """Attend as a sampler with this cache would, had it sampled these tokens. The keys of a layer decide its evictions."""

    def __init__(self, kv: KV, prompt: int):
        self.policy, self.prompt = from_settings(kv), prompt
        self.protected = prompt if kv.protect_prompt else 0
        self.schedule = Schedule(kv.budget + self.protected, kv.interval)
        self.kept_share = 1.0
        """Held tokens, summed over the steps of the response, relative to a dense cache. The same in every layer."""

    def attend(self, layer, queries_1QTD, keys_1HTD, values_1HTD, scale, mask, form=None):
        evicted_at_HT = self.evictions(queries_1QTD, keys_1HTD)
        total = keys_1HTD.shape[2]
        entry_T = torch.arange(total, device=keys_1HTD.device).clamp(min=self.prompt)
        held = (evicted_at_HT.clamp(max=total) - entry_T).clamp(min=0).sum() / len(evicted_at_HT)
        self.kept_share = float(held) / sum(range(self.prompt + 1, total + 1))
        return shadow_attention(queries_1QTD, keys_1HTD, values_1HTD, evicted_at_HT, scale=scale)

    def evictions(self, queries_1QTD: Tensor, keys_1HTD: Tensor) -> Tensor:
        """Return the eviction times [H, T] of one layer's keys."""
        heads, total = keys_1HTD.shape[1:3]
        evicted_at_HT = torch.full((heads, total), NEVER, dtype=torch.int32, device=keys_1HTD.device)
        held_HK = torch.arange(min(self.prompt, total), device=keys_1HTD.device).expand(heads, -1)
        for now in range(self.prompt, total + 1, self.schedule.interval):
            new_n = torch.arange(int(held_HK[0, -1]) + 1, now, device=keys_1HTD.device)
            held_HK = torch.cat([held_HK, new_n.expand(heads, -1)], dim=1)
            if not self.schedule.is_due(now - self.prompt, held_HK.shape[1]):
                continue
            kept_HK = self.policy.select(
                queries_1QTD[:, :, now - self.policy.window : now],
                keys_1HTD.gather(2, held_HK[None, :, :, None].expand(-1, -1, -1, keys_1HTD.shape[-1])),
                None,
                self.schedule.budget,
                positions=held_HK[None],
                protected=torch.tensor([self.protected], device=keys_1HTD.device),
            )[0]
            stays_HK = torch.zeros_like(held_HK, dtype=torch.bool).scatter(1, kept_HK, True)
            dropped_HN = held_HK[~stays_HK].view(heads, -1)
            evicted_at_HT.scatter_(1, dropped_HN, now)
            held_HK = held_HK.gather(1, kept_HK)
        return evicted_at_HT


@dataclass(frozen=True)
class Quantised:
    """Restore quantised keys and values, then attend as the inner view does."""

    storage: Storage
    calibration: Calibration
    inner: Causal | Evicting

    @property
    def kept_share(self) -> float:
        return self.inner.kept_share

    def attend(self, layer, queries_1QTD, keys_1HTD, values_1HTD, scale, mask, form=None):
        ranges = self.calibration.ranges
        keys_1HTD = restored(
            keys_1HTD, self.storage.keys, widened(ranges[self.storage.statistic][layer], self.storage.widened)
        )
        values_1HTD = restored(values_1HTD, self.storage.values, ranges["values"][layer])
        return self.inner.attend(layer, queries_1QTD, keys_1HTD, values_1HTD, scale, mask)


def restored(values: Tensor, candidate: Candidate | None, statistics: Range) -> Tensor:
    return values.bfloat16().to(values.dtype) if candidate is None else dequantised(values, candidate, statistics)
