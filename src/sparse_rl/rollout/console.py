"""Print rollouts in the terminal: the text while it is sampled, then a table of its cost."""

import argparse
import sys
from collections import Counter

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..config import KV, DataConfig, Sampling
from ..data.examples import Example
from ..data.prompts import encoded
from ..errors import UserError
from ..format import counted, size
from ..kv.policies import from_settings
from ..models.load import load_model, load_tokenizer
from ..models.stored_statistics import stored_statistics
from ..sizes import PAGE_TOKENS
from ..terminal import Terminal
from ..text import is_unicode
from ..text import printable as escaped
from .engine import Engine
from .rollout import Rollout
from .stats import Progress


def stream(args: argparse.Namespace, kv: KV, sampling: Sampling, data: DataConfig) -> None:
    """Run `sparse-rl generate`."""
    if args.samples_per_prompt < 1 or args.slots < 1:
        raise UserError("samples-per-prompt and slots must be at least 1.")
    if not all(prompt.strip() for prompt in args.prompts):
        raise UserError("A prompt is empty: pass a prompt with text.")
    if not all(map(is_unicode, args.prompts)):
        raise UserError("A prompt is not valid UTF-8: encode its text as UTF-8.")
    from_settings(kv)  # report a misspelt policy before the model is loaded
    tokenizer = load_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    prompts = encoded(tokenizer, [Example(prompt, None, {}) for prompt in args.prompts], data)
    model = load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.trust_remote_code)
    engine = Engine(model, kv, slots=min(args.slots, len(prompts) * args.samples_per_prompt))
    if engine.needed_statistics:
        engine.load_statistics(stored_statistics(args.model))
    printer = Printer(tokenizer, len(prompts), args.samples_per_prompt)
    rollouts = engine.generate(prompts, args.samples_per_prompt, sampling, record=False, progress=printer)
    printer.close()
    Terminal().print(cost_table(engine, rollouts))


class Printer:
    """Print rollouts in order. The first unfinished rollout is streamed; later ones are printed when it is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: int, samples: int):
        self.tokenizer, self.samples, self.total = tokenizer, samples, prompts * samples
        self.tokens: list[list[int]] = [[] for _ in range(self.total)]
        self.current, self.started, self.printed = 0, False, ""
        self.ended: set[int] = set()

    def __call__(self, progress: Progress) -> None:
        for index, pieces in progress.new.items():
            self.tokens[index] += [token for piece in pieces for token in piece.tolist()]
        self.ended |= set(progress.ended)
        while self.current < self.total:
            self._print_more()
            if self.current not in self.ended:
                return
            self._next()

    def _print_more(self) -> None:
        if not self.started and self.total > 1 and self.tokens[self.current]:
            prompt, sample = divmod(self.current, self.samples)
            sys.stdout.write(f"--- prompt {prompt + 1}, sample {sample + 1} ---\n")
            self.started = True
        text = printable(self.tokenizer.decode(self.tokens[self.current], skip_special_tokens=True))
        if self.current not in self.ended:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the remaining bytes of this character are not sampled yet
        sys.stdout.write(text[len(self.printed) :])
        sys.stdout.flush()
        self.printed = text

    def _next(self) -> None:
        sys.stdout.write("\n")
        self.current, self.started, self.printed = self.current + 1, False, ""

    def close(self) -> None:
        sys.stdout.write("\n")


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot control the terminal."""
    return escaped(text, most=len(text), keep="\n\t")


def why_none(engine: Engine) -> str:
    """Return why a call compacted nothing."""
    if not engine.cache.layers:
        return "every layer has a window"
    return "every sequence fits into the budget" if engine.policy.evicts else "the cache keeps all keys"


def cost_table(engine: Engine, rollouts: list[Rollout]) -> Table:
    stats, cache = engine.stats, engine.cache
    longest = max(len(rollout.prompt) + len(rollout.response) for rollout in rollouts)
    ends = Counter(rollout.finish for rollout in rollouts)
    table = Table(show_header=False)
    table.add_row("rollouts", f"{len(rollouts)} ({', '.join(f'{count} {finish}' for finish, count in ends.items())})")
    table.add_row("tokens", f"{stats.tokens:,} in {stats.seconds:.1f} s, {stats.tokens_per_s:,.1f} tokens/s")
    pages = ""
    if cache.prompts is not None:
        use = "" if cache.prompts.responses else " for prompts"
        pages = f", and {counted(cache.prompts.pages, 'page')} of {PAGE_TOKENS} tokens{use}"
    if cache.windows is not None:
        pages += f", with windows of {cache.windows.capacity} tokens in {counted(len(cache.windows.index_of_layer), 'layer')}"
    table.add_row(
        "KV allocated", f"{size(cache.kv_bytes)} for {counted(cache.slots, 'slot')} of {cache.capacity} tokens{pages}"
    )
    held = max(rollout.kv_peak for rollout in rollouts)
    table.add_row("peak held", f"{held} tokens of a sequence, {size(held * cache.token_bytes)}")
    table.add_row("dense cache", f"{longest} tokens, {size(longest * cache.dense_token_bytes)}")
    if stats.compactions:
        table.add_row("tokens not held", f"{stats.token_savings:.1%} of a dense cache's tokens, over all steps")
        table.add_row("compactions", f"{stats.compactions}, {stats.compaction_s / stats.seconds:.1%} of the time")
    else:
        table.add_row("compactions", f"none: {why_none(engine)}")
    return table
