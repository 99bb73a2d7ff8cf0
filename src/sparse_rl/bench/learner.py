"""`sparse-rl bench learner`: measure an update, the pass before it and the shadow pass on synthetic rollouts, relative to peak
FLOP/s."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from rich.table import Table
from transformers import PreTrainedModel

from ..config import LossConfig, OptimizerConfig
from ..errors import UserError
from ..kv.trace import Trace
from ..learner.batch import Batch, make_batch, response_mask
from ..learner.correction import correct
from ..learner.logprobs import token_logprobs
from ..learner.objective import Objective
from ..learner.optimizer import Optimizer, checkpointed
from ..learner.packing import packs
from ..learner.replay import ReplayKind, replay
from ..learner.update import accumulate
from ..models.support import head_of, prepare
from ..rollout.clock import device_time
from ..rollout.rollout import Rollout
from ..terminal import titled_table, wide_console
from .kernel_shares import kernel_shares
from .record import environment, write_record
from .rollout import bench_model

BUDGET, INTERVAL = 512, 128
PEAK_FLOPS = 989e12
"""Peak dense bfloat16 FLOP/s of an H100 or H200."""
PARTS = {
    "attention": ("flash", "flex", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "log-probs": ("logsumexp", "softmax", "_exp_", "gather"),
    "optimizer": ("adam", "multi_tensor"),
}


@dataclass
class LearnerArm:
    name: str
    tokens: int
    """Number of tokens, including prompts."""
    seconds: float
    flops: float
    peak_bytes: int
    parts: dict[str, float] = field(default_factory=dict)
    """Share of GPU time by kernel name."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / PEAK_FLOPS


def bench(args: argparse.Namespace) -> None:
    if args.tokens < 2 or args.prompt_tokens < 1 or args.microbatches < 1:
        raise UserError("prompt-tokens and microbatches must be at least 1, and tokens at least 2.")
    console = wide_console()
    model = bench_model(args)
    per_microbatch = max(1, args.tokens_per_microbatch // (args.prompt_tokens + args.tokens))
    rollouts = synthetic_rollouts(model, per_microbatch * args.microbatches, args.prompt_tokens, args.tokens, args.seed)
    batch, loss = synthetic_batch(model, rollouts), LossConfig()
    passes = list(packs(rollouts, args.tokens_per_microbatch, share_prompts=False))  # every prompt is different
    settings = OptimizerConfig(
        lr=1e-9, tokens_per_microbatch=args.tokens_per_microbatch, gradient_checkpointing=args.gradient_checkpointing
    )
    optimizer = Optimizer(model, settings, steps=1)
    optimizer.allocate()

    def learn(view: ReplayKind) -> None:
        with checkpointed(model, optimizer.checkpointed_layers):
            accumulate(model, batch, passes, Objective(loss, view))

    def update(view: ReplayKind) -> None:
        learn(view)
        optimizer.update(0)

    @torch.no_grad()
    def before() -> None:
        replay(model, rollouts, "dense", tokens_per_pass=args.tokens_per_microbatch)

    def head_alone() -> None:
        count = per_microbatch * args.tokens
        targets_n = torch.zeros(count, dtype=torch.long, device=model.device)
        ones_n = torch.ones(count, device=model.device)
        head = head_of(model)
        for _ in range(args.microbatches):
            hidden_nD = torch.randn(count, head.weight_VD.shape[1], device=model.device).to(model.dtype).requires_grad_()
            token_logprobs(head, hidden_nD, targets_n, ones_n)[0].sum().backward()
        optimizer.clear()

    def optimizer_alone() -> None:
        for collector in optimizer.collectors:
            collector.grad = torch.zeros_like(collector)
        optimizer.update(0)

    forward_flops = pass_flops(model, rollouts)
    head_flops = 2.0 * model.get_output_embeddings().weight.numel() * len(rollouts) * args.tokens
    work: list[tuple[str, Callable[[], None], float]] = [
        ("update, dense", lambda: update("dense"), 3 * forward_flops),
        ("update, shadow", lambda: update("sparse"), 3 * forward_flops),
        ("old log-probs, no gradient", before, forward_flops),
        ("  of an update: head and log-probs", head_alone, 3 * head_flops),
        ("  of an update: optimizer", optimizer_alone, 0.0),
    ]
    arms = []
    for name, run, flops in work:
        with console.status(f"{name}: {len(rollouts)} x {args.prompt_tokens + args.tokens} tokens"):
            arms.append(_measure(name, run, flops, rollouts, model.device))
        console.print(f"{name}: {arms[-1].tokens_per_s:,.1f} tokens/s")
    console.print(_table(arms, model.device))
    write_record(args.json, _record(args, model, arms), console)


def synthetic_rollouts(model: PreTrainedModel, count: int, prompt_tokens: int, tokens: int, seed: int) -> list[Rollout]:
    """Return rollouts of random tokens whose keys were evicted at random, differently in each layer and head."""
    shape = prepare(model).shape
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.get_text_config().vocab_size
    rollouts = []
    for _ in range(count):
        ids = torch.randint(vocab, (prompt_tokens + tokens,), generator=generator).tolist()
        trace = random_trace(shape.layers, shape.kv_heads, prompt_tokens, tokens, generator)
        rollouts.append(
            Rollout(ids[:prompt_tokens], ids[prompt_tokens:], torch.zeros(tokens), "length", BUDGET + INTERVAL, 1.0, 0, trace)
        )
    return rollouts


def random_trace(
    layers: int,
    kv_heads: int,
    prompt_tokens: int,
    tokens: int,
    generator: torch.Generator,
    *,
    budget: int = BUDGET,
    interval: int = INTERVAL,
) -> Trace:
    """Return a random trace: at each full interval, random keys are evicted until `budget` are left.

    Each key has one fixed random rank. A compaction keeps the `budget` keys with the highest ranks.
    """
    total = prompt_tokens + tokens
    ranks_LHT = torch.rand(layers, kv_heads, total, generator=generator)
    codes_LHT = torch.zeros(layers, kv_heads, total, dtype=torch.int16)
    for code in range(1, (tokens - 1) // interval + 2):
        seen = prompt_tokens + (code - 1) * interval
        if seen <= budget:
            continue
        lowest_kept = ranks_LHT[:, :, :seen].topk(budget, dim=-1).values[..., -1:]
        codes_now = codes_LHT[:, :, :seen]
        codes_now.masked_fill_((codes_now == 0) & (ranks_LHT[:, :, :seen] < lowest_kept), code)
    return Trace(codes_LHT, prompt_tokens, interval)


def synthetic_batch(model: PreTrainedModel, rollouts: list[Rollout]) -> Batch:
    zeros = [torch.zeros(len(rollout.response), device=model.device) for rollout in rollouts]
    mask_BT = response_mask(rollouts).to(model.device)
    corrected = correct(torch.zeros(mask_BT.shape, device=model.device), mask_BT, "none")
    longest = max(len(rollout.response) for rollout in rollouts)
    return make_batch(rollouts, torch.ones(len(rollouts)), zeros, corrected, LossConfig(), longest)


def pass_flops(model: PreTrainedModel, rollouts: list[Rollout]) -> float:
    """Return the FLOPs of one forward pass. A backward pass takes twice as many.

    Each weight counts 2 per token. The LM head counts only at tokens that predict a response token, and embedding lookups
    count 0. Attention is counted as causal over whole sequences; a shadow pass needs no more. Recomputation is not counted.
    """
    shape = prepare(model).shape
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head_weights = head.numel()
    layer_weights = sum(weight.numel() for weight in model.parameters()) - head_weights
    if head is not embedding:
        layer_weights -= embedding.numel()
    flops = 0.0
    for rollout in rollouts:
        fed, predicted = len(rollout.prompt) + len(rollout.response) - 1, len(rollout.response)
        flops += 2 * layer_weights * fed + 2 * head_weights * predicted
        # Scores and values take 4 x fed^2; the causal mask halves this.
        flops += shape.layers * shape.q_heads * shape.head_dim * 2 * fed * fed
    return flops


def _measure(name: str, run: Callable[[], None], flops: float, rollouts: list[Rollout], device: torch.device) -> LearnerArm:
    """Return the median of three runs after a warm-up run that compiles. One more run is profiled."""
    cuda = device.type == "cuda"
    run()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(3):
        started = device_time(device)
        run()
        seconds.append(device_time(device) - started)
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    parts = kernel_shares(run, PARTS) if cuda else {}
    tokens = sum(len(rollout.prompt) + len(rollout.response) for rollout in rollouts)
    return LearnerArm(name, tokens, sorted(seconds)[1], flops, peak, parts)


def _table(arms: list[LearnerArm], device: torch.device) -> Table:
    cuda = device.type == "cuda"
    columns = ["", "seconds", "tokens/s", "of dense"]
    if cuda:
        columns += ["MFU", "peak memory", *(f"{part} %" for part in arms[0].parts)]
    table = titled_table("Prompt and response tokens over wall time", columns)
    for arm in arms:
        row = [arm.name, f"{arm.seconds:.3f}", f"{arm.tokens_per_s:,.1f}", f"{arm.seconds / arms[0].seconds:.2f}x"]
        if cuda:
            row += [f"{arm.mfu:.1%}", f"{arm.peak_bytes / 2**30:.1f} GiB", *(f"{share:.0%}" for share in arm.parts.values())]
        table.add_row(*row)
    return table


def _record(args: argparse.Namespace, model: PreTrainedModel, arms: list[LearnerArm]) -> dict:
    return {
        **environment("learner", model.device),
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": args.seed,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "tokens_per_microbatch": args.tokens_per_microbatch,
        "microbatches": args.microbatches,
        "gradient_checkpointing": args.gradient_checkpointing,
        "evictions": {"budget": BUDGET, "interval": INTERVAL, "choice": "random"},
        "peak_flops": PEAK_FLOPS,
        "arms": [
            asdict(arm) | {"tokens_per_s": arm.tokens_per_s, "mfu": arm.mfu, "seconds_of_dense": arm.seconds / arms[0].seconds}
            for arm in arms
        ],
    }
