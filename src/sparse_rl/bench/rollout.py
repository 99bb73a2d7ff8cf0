"""`sparse-rl bench rollout`: transformers `generate`, our dense engine and our sparse engine on the same work.

Decode is counted from the step after which every slot has been compacted: sampling, log-probs, eviction records and
compactions are in it, prefill is not. Beside it stands the whole call: sampled tokens over wall time.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from ..errors import UserError
from ..kv.policies import from_settings
from ..kv.settings import KV
from ..models.load import DTYPES, load_model, place
from ..models.shapes import SHAPES, random_model
from ..plan.command import wide_console
from ..plan.dimensions import from_config
from ..plan.roofline import decode_s, find_gpu
from ..rollout.engine import Engine
from ..rollout.settings import Sampling
from ..rollout.stats import Progress
from .lengths import drawn_lengths
from .record import environment

WARM_UP_TOKENS = 4
PROFILED_STEPS = 128


@dataclass
class Arm:
    name: str
    slots: int
    rollouts: int
    tokens: int
    seconds: float
    kv_bytes: int
    """Allocated."""
    decode_tokens_per_s: float | None = None
    roofline_share: float | None = None
    """Of what matrix products and one read of weights and cache leave possible."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Of the whole call: prefill, decode, compaction, host."""
    decode_by_part: dict[str, float] = field(default_factory=dict)
    """Shares of the device's time in decode steps, by kernel: attention, matrix products, sampling, the rest."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def bench(args: argparse.Namespace, kv: KV) -> None:
    if args.batch < 1 or args.prompt_tokens < 1 or args.max_tokens <= WARM_UP_TOKENS:
        raise UserError(f"batch and prompt-tokens must be at least 1, and max-tokens more than {WARM_UP_TOKENS}.")
    if kv.policy == "full":
        raise UserError("The dense engine runs anyway: name the sparse policy to compare, such as --kv.policy rkv.")
    from_settings(kv)  # a typo shows before minutes of work
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"The folder of {args.json} does not exist: make it first.")
    console = wide_console()
    model = bench_model(args)
    dense = KV(policy="full")
    dense_slots = same_memory_slots(args, kv) if args.same_memory else args.batch
    arms = []
    for kind, name, run in (
        ("generate", "transformers generate", lambda: generate_arm(model, args)),
        ("dense", "sparse-rl, dense", lambda: engine_arm(model, dense, dense_slots, args)),
        ("sparse", f"sparse-rl, {kv.policy} {kv.budget}+{kv.interval}", lambda: engine_arm(model, kv, args.batch, args)),
    ):
        if kind not in args.arms:
            continue
        with console.status(name):
            arms.append(run())
        arms[-1].name = name
        console.print(f"{name}: {arms[-1].tokens_per_s:,.1f} tokens/s", highlight=False)
    console.print(table(arms))
    if args.json:
        args.json.write_text(json.dumps(record(args, kv, model, arms), indent=1) + "\n")
        console.print(f"Written to {args.json}.", highlight=False)


def bench_model(args: argparse.Namespace) -> PreTrainedModel:
    if args.model not in SHAPES:
        return load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.trust_remote_code)
    dtype, device = place(args.dtype, args.device)
    return random_model(args.model, dtype=DTYPES[dtype], device=device, seed=args.seed)


def same_memory_slots(args: argparse.Namespace, kv: KV) -> int:
    """What an ideal paged cache would hold of mean sequences in the memory of the sparse cache."""
    lengths = response_lengths(args, 4096)
    return max(1, int(args.batch * kv.capacity / (args.prompt_tokens + sum(lengths) / len(lengths))))


def response_lengths(args: argparse.Namespace, count: int) -> list[int]:
    if args.lengths == "full":
        return [args.max_tokens] * count
    return drawn_lengths(range(count), args.max_tokens)


def _prompts(model: PreTrainedModel, count: int, args: argparse.Namespace) -> torch.Tensor:
    vocab = model.config.get_text_config().vocab_size
    return torch.randint(vocab, (count, args.prompt_tokens), generator=torch.Generator().manual_seed(args.seed))


def generate_arm(model: PreTrainedModel, args: argparse.Namespace) -> Arm:
    """The peer: every row to the same length, as it works best."""
    prompts = _prompts(model, args.batch, args).to(model.device)
    tokens = min(args.generate_tokens, args.max_tokens)

    def run(tokens: int) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return cache

    torch.manual_seed(args.seed)
    attention = model.config._attn_implementation
    stop, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None  # every row runs to the end
    try:
        model.set_attn_implementation("sdpa")
        run(WARM_UP_TOKENS)
        started = _now(model)
        cache = run(tokens)
        seconds = _now(model) - started
    finally:
        model.generation_config.eos_token_id = stop
        model.set_attn_implementation(attention)
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Arm("", args.batch, args.batch, args.batch * tokens, seconds, kv_bytes)


class Meter:
    """Watches a call and times its decode from the moment every slot has been compacted, over whole intervals."""

    def __init__(self, engine: Engine, slots: int):
        self.engine, self.slots = engine, slots
        self.marks: list[tuple[float, int, int]] = []

    def __call__(self, progress: Progress) -> None:
        stats = self.engine.stats
        if not self.engine.policy.evicts or stats.compactions >= self.slots:
            self.marks.append((time.perf_counter(), progress.tokens, stats.steps))

    def tokens_per_s(self) -> float | None:
        interval = self.engine.kv.interval if self.engine.policy.evicts else 1
        while len(self.marks) > 1 and (self.marks[-1][2] - self.marks[0][2]) % interval:
            self.marks.pop()
        if len(self.marks) < 2:
            return None
        (first, before, _), (last, after, _) = self.marks[0], self.marks[-1]
        return (after - before) / (last - first)


def engine_arm(model: PreTrainedModel, kv: KV, slots: int, args: argparse.Namespace) -> Arm:
    rollouts = max(1, round(slots * args.waves))
    prompts = _prompts(model, rollouts, args).tolist()
    lengths = response_lengths(args, rollouts)
    engine = Engine(model, kv, slots=slots)
    engine.reserve(args.prompt_tokens + args.max_tokens)
    warm_up(engine, prompts[:slots], min(args.max_tokens, kv.capacity), uniform=args.lengths == "uniform")
    meter = Meter(engine, slots)
    sampling = Sampling(max_tokens=args.max_tokens, stop=(), seed=args.seed)
    started = _now(model)
    done = engine.generate(prompts, sampling=sampling, limits=lengths, allow_beyond_context=True, progress=meter)
    seconds = _now(model) - started
    stats = engine.stats
    arm = Arm("", slots, rollouts, sum(len(rollout.response) for rollout in done), seconds, stats.peak_kv_bytes)
    arm.decode_tokens_per_s = meter.tokens_per_s()
    arm.seconds_by_part = {name: getattr(stats, f"{name}_s") for name in ("prefill", "decode", "compaction", "host")}
    if model.device.type == "cuda":
        held = kv.capacity if engine.policy.evicts else args.prompt_tokens + sum(lengths) / len(lengths) / 2
        arm.roofline_share = share_of_roofline(model, slots, held, arm.decode_tokens_per_s)
        arm.decode_by_part = profile(engine, prompts[:slots])
    return arm


def warm_up(engine: Engine, prompts: Sequence[list[int]], tokens: int, *, uniform: bool) -> None:
    """Compile and capture all that a call of such lengths will need: as slots fall idle, steps of fewer slots."""
    tokens = tokens if engine.use_graphs else WARM_UP_TOKENS
    limits = drawn_lengths(range(len(prompts)), tokens) if uniform else None
    engine.generate(prompts, sampling=Sampling(max_tokens=tokens, stop=()), limits=limits, allow_beyond_context=True)


def share_of_roofline(model: PreTrainedModel, slots: int, held: float, tokens_per_s: float | None) -> float | None:
    if tokens_per_s is None:
        return None
    try:
        gpu = find_gpu(torch.cuda.get_device_name(model.device))
        dims = from_config(model.config.get_text_config().to_dict(), "the model")
    except UserError:
        return None  # a GPU or a model that the plan does not know
    return tokens_per_s * decode_s(dims, slots, held, model.dtype.itemsize, gpu) / slots


PARTS = {
    "attention": ("_attend", "_combine"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "sampling": ("_sum_blocks", "_draw"),
}


def profile(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Shares of kernel time in decode steps, from a short call whose prefill is taken off."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    def times(tokens: int) -> dict[str, float]:
        with recording(activities=[ProfilerActivity.CUDA]) as recorded:
            engine.generate(prompts, sampling=Sampling(max_tokens=tokens, stop=()), allow_beyond_context=True)
        sums: dict[str, float] = dict.fromkeys([*PARTS, "other"], 0.0)
        for row in recorded.key_averages():
            name = row.key.lower()
            part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "other")
            sums[part] += row.self_device_time_total
        return sums

    short, long = times(1), times(1 + PROFILED_STEPS)
    spent = {part: max(0.0, long[part] - short[part]) for part in long}
    total = sum(spent.values())
    return {part: time / total for part, time in spent.items()} if total else {}


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def table(arms: list[Arm]) -> Table:
    peer = arms[0]
    made = Table(
        title="The whole of each call (sampled tokens over wall time), and its decode steps alone", title_justify="left"
    )
    for column in ("", "slots", "tokens/s", "ratio", "decode tok/s", "of roofline", "KV cache", "compaction", "host"):
        made.add_column(column, justify="left" if not column else "right")
    for arm in arms:
        parts = arm.seconds_by_part
        made.add_row(
            arm.name,
            str(arm.slots),
            f"{arm.tokens_per_s:,.1f}",
            f"{arm.tokens_per_s / peer.tokens_per_s:.2f}x",
            f"{arm.decode_tokens_per_s:,.0f}" if arm.decode_tokens_per_s else "",
            f"{arm.roofline_share:.0%}" if arm.roofline_share else "",
            f"{arm.kv_bytes / 2**20:,.1f} MiB",
            *(f"{parts[name] / arm.seconds:.1%}" if parts else "" for name in ("compaction", "host")),
        )
    return made


def record(args: argparse.Namespace, kv: KV, model: PreTrainedModel, arms: list[Arm]) -> dict:
    return {
        **environment("rollout", model.device),
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{
            name: getattr(args, name)
            for name in (
                "seed",
                "batch",
                "prompt_tokens",
                "max_tokens",
                "lengths",
                "waves",
                "same_memory",
                "generate_tokens",
                "arms",
            )
        },
        "kv": kv.model_dump(),
        "arms": [
            asdict(arm) | {"tokens_per_s": arm.tokens_per_s, "ratio": arm.tokens_per_s / arms[0].tokens_per_s} for arm in arms
        ],
    }
