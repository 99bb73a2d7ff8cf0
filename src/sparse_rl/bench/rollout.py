"""`sparse-rl bench rollout`: compare transformers `generate`, our dense engine and our sparse engine on the same work.

Decode is timed from the step after which every slot has been compacted. It includes sampling, log-probs, eviction records and
compactions, but not prefill. The whole call is reported next to it: sampled tokens divided by wall time. Prompts come in
groups of 8 samples, as in training. The roofline and the profile of a decode step use each arm's mean number of held tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from ..config import KV, Sampling
from ..errors import UserError
from ..kv.policies import from_settings
from ..models.load import DTYPES, load_model, place
from ..models.shapes import SHAPES, random_model
from ..models.support import set_head_dtype
from ..plan.dimensions import from_config
from ..plan.roofline import decode_s, find_gpu, mean_held
from ..rollout.clock import Clock, device_time
from ..rollout.decode import SlotState
from ..rollout.engine import Engine
from ..rollout.stats import Progress
from ..sizes import DENSE_SLOT_TOKENS, PAGE_TOKENS, least_dense_pages, pages_of
from ..terminal import titled_table, wide_console
from .kernel_shares import kernel_shares
from .lengths import GROUP, drawn_lengths, live_tokens, mean_response_tokens_held
from .record import environment, write_record

WARM_UP_TOKENS = 4
TIMED_CHUNKS = 3


@dataclass
class RolloutArm:
    name: str
    slots: int
    rollouts: int
    tokens: int
    seconds: float
    kv_bytes: int
    """Allocated bytes of keys and values."""
    side_bytes: int = 0
    """Allocated bytes of positions, lengths and the ring buffer of queries."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Pauses of dense sequences for want of pages, and the tokens that were computed again."""
    held_tokens: float | None = None
    """Mean number of tokens that a running sequence holds during decode. The roofline and the profile use it."""
    decode_tokens_per_s: float | None = None
    roofline_share: float | None = None
    """Measured speed as a share of the roofline, which counts the matrix products and one read of the weights and of the held
    keys and values. If a prompt is read once for several slots, it counts once for its samples."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole call by phase: prefill, decode, compaction, host."""
    decode_by_part: dict[str, float] = field(default_factory=dict)
    """Shares of device time in decode steps at `held_tokens`, by kind of kernel: attention, matrix products, sampling,
    other."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def bench(args: argparse.Namespace, kv: KV) -> None:
    if args.batch < 1 or args.prompt_tokens < 1 or args.max_tokens <= WARM_UP_TOKENS:
        raise UserError(f"batch and prompt-tokens must be at least 1, and max-tokens more than {WARM_UP_TOKENS}.")
    if not kv.is_sparse:
        raise UserError(
            "kv.policy = full is the dense engine, which bench rollout always runs: set a sparse policy, such as "
            "--kv.policy rkv, or --kv.dtype 8bit."
        )
    if args.same_memory and not {"dense", "sparse"} <= set(args.arms):
        raise UserError("--same-memory gives the dense arm the memory of the sparse arm: use --arms dense sparse.")
    from_settings(kv)  # report a misspelt policy before minutes of work
    console = wide_console()
    model = bench_model(args)
    found: dict[str, RolloutArm] = {}
    for kind, name, run in (
        ("generate", "transformers generate", lambda: generate_arm(model, args)),
        ("sparse", f"sparse-rl, {kv.label}", lambda: engine_arm(model, kv, args.batch, args)),
        ("dense", "sparse-rl, dense", lambda: dense_arm(model, args, found.get("sparse"))),
    ):
        if kind not in args.arms:
            continue
        with console.status(name):
            found[kind] = run()
        found[kind].name = name
        console.print(f"{name}: {found[kind].tokens_per_s:,.1f} tokens/s")
    arms = [found[kind] for kind in ("generate", "dense", "sparse") if kind in found]
    console.print(table(arms))
    write_record(args.json, record(args, kv, model, arms), console)


def bench_model(args: argparse.Namespace) -> PreTrainedModel:
    if args.model not in SHAPES:
        model = load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.trust_remote_code)
    else:
        dtype, device = place(args.dtype, args.device)
        model = random_model(args.model, dtype=DTYPES[dtype], device=device, seed=args.seed)
    set_head_dtype(model, args.head_dtype)
    return model


DENSE_SLOTS = 1.5
"""Slots of a dense engine in a given memory, as a multiple of the sequences whose live tokens fill it."""


def dense_arm(model: PreTrainedModel, args: argparse.Namespace, sparse: RolloutArm | None) -> RolloutArm:
    """Measure our dense engine, with `--same-memory` in the memory of the sparse arm."""
    kv = KV(policy="full")
    if not args.same_memory:
        return engine_arm(model, kv, args.batch, args)
    assert sparse is not None
    kv_bytes = sparse.kv_bytes + sparse.side_bytes  # the dense cache is not charged for its side tables
    return engine_arm(model, kv, dense_slots(model, args, kv_bytes), args, kv_bytes)


def dense_slots(model: PreTrainedModel, args: argparse.Namespace, kv_bytes: int) -> int:
    """Return the slots of a dense engine with this many bytes for keys and values."""
    engine = Engine(model, KV(policy="full"), slots=1)
    engine.reserve_dense(args.prompt_tokens, args.max_tokens, 1, 1)
    token, window = engine.cache.token_bytes, engine.cache.fixed_bytes
    longest = least_dense_pages(args.prompt_tokens, args.max_tokens) * PAGE_TOKENS * token
    most = (kv_bytes - longest) // (DENSE_SLOT_TOKENS * token + window)
    if most < 1:
        raise UserError(
            f"The sparse arm takes {kv_bytes:,} bytes, too few for a dense sequence of {args.prompt_tokens + args.max_tokens:,} "
            "tokens: raise --batch, or lower --max-tokens."
        )
    live = live_tokens(response_lengths(args, 4096), args.prompt_tokens)
    wanted = int(DENSE_SLOTS * kv_bytes / (live * token + window))
    return max(1, min(wanted, kv_bytes // (2 * DENSE_SLOT_TOKENS * token + window), most))


def response_lengths(args: argparse.Namespace, count: int) -> list[int]:
    if args.lengths == "full":
        return [args.max_tokens] * count
    return drawn_lengths(range(count), args.max_tokens)


def _prompts(model: PreTrainedModel, groups: int, args: argparse.Namespace) -> torch.Tensor:
    vocab = model.config.get_text_config().vocab_size
    return torch.randint(vocab, (groups, args.prompt_tokens), generator=torch.Generator().manual_seed(args.seed))


def generate_arm(model: PreTrainedModel, args: argparse.Namespace) -> RolloutArm:
    """Measure transformers `generate`. All rows have the same length, which is its best case."""
    groups = -(-args.batch // GROUP)
    prompts = _prompts(model, groups, args).repeat_interleave(GROUP, 0)[: args.batch].to(model.device)
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
    # every row runs to the maximum length
    stop, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        model.set_attn_implementation("sdpa")
        run(WARM_UP_TOKENS)
        started = device_time(model.device)
        cache = run(tokens)
        seconds = device_time(model.device) - started
    finally:
        model.generation_config.eos_token_id = stop
        model.set_attn_implementation(attention)
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return RolloutArm("", args.batch, args.batch, args.batch * tokens, seconds, kv_bytes)


class Meter:
    """Measures decode speed from the time when every slot has been compacted, over whole intervals."""

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


def engine_arm(
    model: PreTrainedModel, kv: KV, slots: int, args: argparse.Namespace, kv_bytes: int | None = None
) -> RolloutArm:
    wanted = max(1, round(args.batch * args.waves))
    samples = min(GROUP, wanted)
    prompts = _prompts(model, -(-wanted // samples), args).tolist()
    rollouts = len(prompts) * samples
    lengths = response_lengths(args, rollouts)
    engine = Engine(model, kv, slots=slots)
    engine.reserve_dense(args.prompt_tokens, args.max_tokens, len(prompts), samples, kv_bytes=kv_bytes)
    engine.reserve_prompts(args.prompt_tokens, len(prompts), samples)
    # A slot with a stored prompt is compacted when its response exceeds the capacity.
    tokens = min(args.max_tokens, kv.capacity + kv.interval)
    warm_up(engine, (prompts * slots)[:slots], tokens, uniform=args.lengths == "uniform")
    meter = Meter(engine, slots)
    sampling = Sampling(max_tokens=args.max_tokens, stop=(), seed=args.seed)
    started = device_time(model.device)
    done = engine.generate(prompts, samples, sampling, limits=lengths, allow_beyond_context=True, progress=meter)
    seconds = device_time(model.device) - started
    stats = engine.stats
    arm = RolloutArm("", slots, rollouts, sum(len(rollout.response) for rollout in done), seconds, stats.peak_kv_bytes)
    arm.side_bytes, arm.preemptions, arm.recomputed_tokens = stats.side_bytes, stats.preemptions, stats.recomputed_tokens
    arm.decode_tokens_per_s = meter.tokens_per_s()
    arm.held_tokens = mean_held(kv, args.prompt_tokens, max(lengths), mean_response_tokens_held(lengths))
    arm.seconds_by_part = {name: getattr(stats, f"{name}_s") for name in ("prefill", "decode", "compaction", "host")}
    if engine.use_graphs:
        stored, read = args.prompt_tokens if kv.stores_prompts else 0, arm.held_tokens
        if engine.cache.prompts is not None and engine.cache.prompts.reads_once:
            read -= stored * (1 - 1 / samples)
        arm.roofline_share = share_of_roofline(model, kv, slots, read, arm.decode_tokens_per_s)
        arm.decode_by_part = kernel_shares(decode_chunks(engine, int(arm.held_tokens), stored), PARTS)
    return arm


def warm_up(engine: Engine, prompts: Sequence[list[int]], tokens: int, *, uniform: bool) -> None:
    """Compile and capture everything that a call with such lengths needs, including steps with fewer slots as slots become
    idle."""
    tokens = tokens if engine.use_graphs else WARM_UP_TOKENS
    samples = min(GROUP, len(prompts)) if engine.schedule.stores_prompts else 1  # as many groups as the store holds
    prompts = prompts[: -(-len(prompts) // samples)]
    limits = drawn_lengths(range(len(prompts) * samples), tokens) if uniform else None
    engine.generate(prompts, samples, Sampling(max_tokens=tokens, stop=()), limits=limits, allow_beyond_context=True)


def share_of_roofline(model: PreTrainedModel, kv: KV, slots: int, held: float, tokens_per_s: float | None) -> float | None:
    if tokens_per_s is None:
        return None
    try:
        gpu = find_gpu(torch.cuda.get_device_name(model.device))
        dims = from_config(model.config.get_text_config().to_dict(), "the model")
    except UserError:
        return None  # the plan does not support this GPU or model
    in_window = min(dims.window or 0, held)  # a lower bound: windows hold more than a full layer that is compressed
    step_s = decode_s(dims, slots, held, model.dtype.itemsize, gpu, kv.dtype, in_window=in_window, layer_s=0.0)
    return tokens_per_s * step_s / slots


PARTS = {
    "attention": ("_attend", "_combine"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "sampling": ("_sum_blocks", "_draw"),
}


def decode_chunks(engine: Engine, held: int, stored: int = 0) -> Callable[[], None]:
    """Return a function that runs one chunk of decode steps. Every slot starts with `held` tokens, of which the prompt store
    holds `stored`."""
    graphs, clock = engine._graphs(), Clock(engine.model.device)
    assert graphs is not None
    slots = engine.cache.slots
    if engine.schedule.pages_responses:  # each slot reads other pages
        stored = held // PAGE_TOKENS * PAGE_TOKENS
        store, each = engine.cache.prompts, pages_of(stored)
        assert store is not None
        store.assign({slot: [(slot * each + page) % store.pages for page in range(each)] for slot in range(slots)})
    state = SlotState(*([5] * slots, [held] * slots, [held - stored] * slots, [stored] * slots, [1] * slots, [2**20] * slots))

    @torch.no_grad()
    def run() -> None:
        graphs.start(state, Sampling())
        graphs.launch(engine.chunk, clock).wait()

    run()  # captures the graphs
    return run


def decode_step_s(engine: Engine, held: int) -> float:
    """Return the seconds of a decode step in which every slot holds `held` tokens, without compaction."""
    run, seconds = decode_chunks(engine, held), []
    for _ in range(TIMED_CHUNKS):
        started = device_time(engine.model.device)
        run()
        seconds.append(device_time(engine.model.device) - started)
    return statistics.median(seconds) / engine.chunk


def table(arms: list[RolloutArm]) -> Table:
    peer = arms[0]
    headings = ("", "slots", "tokens/s", "ratio", "decode tok/s", "of roofline", "KV cache", "compaction", "host")
    made = titled_table("Whole calls (sampled tokens over wall time), and decode steps alone", headings)
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


RECORDED = ("seed", "batch", "prompt_tokens", "max_tokens", "lengths", "waves", "same_memory", "generate_tokens", "arms")
"""Arguments that the record holds."""


def record(args: argparse.Namespace, kv: KV, model: PreTrainedModel, arms: list[RolloutArm]) -> dict:
    return {
        **environment("rollout", model.device),
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: getattr(args, name) for name in RECORDED},
        "kv": kv.model_dump(),
        "arms": [
            asdict(arm) | {"tokens_per_s": arm.tokens_per_s, "ratio": arm.tokens_per_s / arms[0].tokens_per_s} for arm in arms
        ],
    }
