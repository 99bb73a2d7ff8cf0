"""`sparse-rl bench rollout`: transformers `generate`, our dense engine and our sparse engine on the same work."""

import argparse
import json
import time
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from ..errors import UserError
from ..kv.policies import from_settings
from ..kv.settings import KV
from ..models.load import DTYPES, load_model
from ..rollout.engine import Engine
from ..rollout.settings import Sampling
from .record import environment
from .shapes import SHAPES, random_model

WARM_UP_TOKENS = 4


@dataclass
class Arm:
    name: str
    tokens: int
    seconds: float
    kv_bytes: int

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
    console = Console()
    model = _model(args)
    generator = torch.Generator().manual_seed(args.seed)
    vocab = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocab, (args.batch, args.prompt_tokens), generator=generator)
    arms = []
    for name, run in (
        ("transformers generate", lambda: _generate(model, prompts, args)),
        ("sparse-rl, dense", lambda: _engine(model, KV(policy="full"), prompts, args)),
        (f"sparse-rl, {kv.policy} {kv.budget}+{kv.interval}", lambda: _engine(model, kv, prompts, args)),
    ):
        with console.status(f"{name}: {args.batch} x {args.max_tokens} tokens"):
            tokens, seconds, kv_bytes = run()
        arms.append(Arm(name, tokens, seconds, kv_bytes))
        console.print(f"{name}: {arms[-1].tokens_per_s:,.1f} tokens/s", highlight=False)
    console.print(_table(arms))
    if args.json:
        args.json.write_text(json.dumps(_record(args, kv, model, arms), indent=1) + "\n")
        console.print(f"Written to {args.json}.", highlight=False)


def _model(args: argparse.Namespace) -> PreTrainedModel:
    if args.model not in SHAPES:
        return load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.trust_remote_code)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[args.dtype or ("bfloat16" if device.startswith("cuda") else "float32")]
    return random_model(args.model, dtype=dtype, device=device, seed=args.seed)


def _generate(model: PreTrainedModel, prompts: torch.Tensor, args: argparse.Namespace) -> tuple[int, float, int]:
    prompts = prompts.to(model.device)

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
    stop, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None  # every row runs to the end
    try:
        run(WARM_UP_TOKENS)
        started = _now(model)
        cache = run(args.max_tokens)
        seconds = _now(model) - started
    finally:
        model.generation_config.eos_token_id = stop
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return args.batch * args.max_tokens, seconds, kv_bytes


def _engine(model: PreTrainedModel, kv: KV, prompts: torch.Tensor, args: argparse.Namespace) -> tuple[int, float, int]:
    engine = Engine(model, kv, slots=args.batch)
    engine.generate(prompts.tolist(), sampling=Sampling(max_tokens=WARM_UP_TOKENS, stop=()), allow_beyond_context=True)
    started = _now(model)
    sampling = Sampling(max_tokens=args.max_tokens, stop=(), seed=args.seed)
    rollouts = engine.generate(prompts.tolist(), sampling=sampling, allow_beyond_context=True)
    seconds = _now(model) - started
    return sum(len(rollout.response) for rollout in rollouts), seconds, engine.stats.peak_kv_bytes


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _table(arms: list[Arm]) -> Table:
    peer = arms[0]
    table = Table(title="The whole of each call: sampled tokens over wall time")
    for column in ("", "tokens/s", "ratio", "KV cache", "of generate's"):
        table.add_column(column, justify="left" if not column else "right")
    for arm in arms:
        table.add_row(
            arm.name,
            f"{arm.tokens_per_s:,.1f}",
            f"{arm.tokens_per_s / peer.tokens_per_s:.2f}x",
            f"{arm.kv_bytes / 2**20:,.1f} MiB",
            f"{arm.kv_bytes / peer.kv_bytes:.0%}",
        )
    return table


def _record(args: argparse.Namespace, kv: KV, model: PreTrainedModel, arms: list[Arm]) -> dict:
    return {
        **environment("rollout", model.device),
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": args.seed,
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "kv": kv.model_dump(),
        "arms": [
            asdict(arm) | {"tokens_per_s": arm.tokens_per_s, "ratio": arm.tokens_per_s / arms[0].tokens_per_s} for arm in arms
        ],
    }
