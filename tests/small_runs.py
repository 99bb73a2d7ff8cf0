"""Training runs small enough for tests: a random model of some ten thousand weights, eight problems, rewards that differ."""

import json
import multiprocessing
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from frames import in_one_chunk
from sparse_rl import load_tokenizer
from sparse_rl.cli import main

REWARDS = '''
import json, math, os, signal, time

def sums(prompts, completions, **columns):
    """Any text has one, and few have the same."""
    return [float(sum(map(ord, text)) % 1009) for text in completions]

def some(prompts, completions, **columns):
    """Tells apart only the answers to every second prompt."""
    return sums(prompts, completions) if int(prompts[0][0]) % 2 else [1.0]

def same(prompts, completions, **columns):
    return [1.0] * len(completions)

def short(prompts, completions, completion_ids, **columns):
    """Answers shrink to a few tokens within ten steps."""
    return [-float(len(ids)) for ids in completion_ids]

def distinct(prompts, completions, **columns):
    """A model whose weights are destroyed says one thing only."""
    return [float(len(set(text))) for text in completions]

def fails(prompts, completions, **columns):
    """About every second sample fails, in one of five ways."""
    ways = [lambda: 1 / 0, lambda: time.sleep(60), lambda: [math.nan], lambda: [None], lambda: [1.0, 2.0]]
    kind = sum(map(ord, completions[0])) % 10
    return ways[kind]() if kind < len(ways) else sums(prompts, completions)

def raises(prompts, completions, **columns):
    raise RuntimeError("out of\\nideas")

def hangs(prompts, completions, **columns):
    time.sleep(60)

def tells_the_columns(prompts, completions, finish, completion_ids, **columns):
    print("columns", json.dumps([completions[0], finish[0], completion_ids[0]]))
    return sums(prompts, completions)

def only_gold(prompts, completions, **columns):
    if completions != columns["answer"]:
        raise RuntimeError("no gold")
    return [1.0]

def hangs_on_texts(prompts, completions, **columns):
    return [1.0] if completions == columns["answer"] else time.sleep(60)

def returns_none(prompts, completions, **columns):
    return [None]

def returns_nan(prompts, completions, **columns):
    return [math.nan]

def returns_two(prompts, completions, **columns):
    return [1.0, 2.0]

calls = 0

def silent_once(prompts, completions, **columns):
    """Fails on every rollout of the second step. The first call of all is the try on a gold."""
    global calls
    calls += 1
    if 5 < calls <= 9:
        raise RuntimeError("the judge is down")
    return sums(prompts, completions)

def tells_its_pid(prompts, completions, **columns):
    print("pid", os.getpid())
    return sums(prompts, completions)

def kills_the_trainer(prompts, completions, **columns):
    supervisor = os.getppid()
    with open(f"/proc/{supervisor}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    return [0.0]
'''


def make_world(folder: Path, hidden_size: int = 32) -> Path:
    """The model, the problems and the rewards of the runs, in `folder`."""
    tokenizer = load_tokenizer("tiny")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # fresh weights attend almost evenly, which would hide what eviction does
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{number}:4{number}+85=", "answer": "1"} for number in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def one_package_missing(world: Path, folder: Path) -> Path:
    """The same world, but the reward needs a package that the second rank does not have."""
    shutil.copytree(world, folder / "world")
    missing = 'import os\nif os.environ.get("RANK") == "1":\n    import there_is_no_such_package\n'
    (folder / "world/rewards.py").write_text(missing + REWARDS)
    return folder / "world"


def arguments(world: Path, run: Path, *flags: str, reward: str = "sums") -> list[str]:
    """Of `sparse-rl train`, for two steps of four rollouts unless `flags` say otherwise."""
    settings = {
        "run-dir": run,
        "steps": 2,
        "model.path": world / "model",
        "data.train": world / "problems.jsonl",
        "reward.function": f"{world / 'rewards.py'}:{reward}",
        "reward.workers": 1,
        "reward.truncated": "grade",  # the model is random, and nearly all of its answers are cut off
        "kv.policy": "rkv",
        "kv.budget": 20,
        "kv.interval": 4,
        "kv.window": 4,
        "kv.protect-prompt": "false",
        "rollout.prompts-per-step": 2,
        "rollout.samples-per-prompt": 2,
        "rollout.max-tokens": 24,
        "optimizer.lr": 1e-2,
        "eval.problems": 0,
    }
    return ["train", *(text for key, value in settings.items() for text in (f"--{key}", str(value))), *flags]


def train(world: Path, run: Path, *flags: str, reward: str = "sums") -> None:
    with one_thread():
        main(arguments(world, run, *flags, reward=reward))


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small are faster on one, and the same to the bit in every process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def refused(capsys, *arguments: str) -> str:
    """The one sentence that a mistake ends in."""
    with pytest.raises(SystemExit) as end, one_thread():
        main(list(arguments))
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("sparse-rl: ") and err.count("\n") == 1, err
    return err.removeprefix("sparse-rl: ").strip()


def cpu_of_children() -> float:
    """Seconds of CPU that ended child processes took: a busy machine does not add to them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


class Command:
    """`sparse-rl` in a process of its own, which signals and limits may meet; forked from one that has imported torch."""

    def __init__(self, arguments: list[str], *, file_bytes: int | None = None):
        reader, writer = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_command, args=(arguments, writer, file_bytes))
        self.process.start()
        writer.close()
        self.output = os.fdopen(os.dup(reader.fileno()))

    def read_to(self, start: str) -> None:
        """Wait for a line that starts so."""
        seen = []
        while not (seen or [""])[-1].startswith(start):
            seen.append(self.output.readline())
            assert seen[-1], f"it ended without {start!r}: {seen}"

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """(exit code, or minus the signal; all output not read before)."""
        with self.output:
            rest = self.output.read()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode, rest


CONTEXT = multiprocessing.get_context("forkserver")
LATE = ["pandas", "pyarrow.pandas_compat", "transformers.models.qwen2.modeling_qwen2", "transformers.generation.utils"]
"""What a run imports only when it needs it, and every run of a test needs."""
CONTEXT.set_forkserver_preload(["small_runs", "sparse_rl.train.trainer", "sparse_rl.train.run", *LATE])


def _command(arguments: list[str], output: Connection, file_bytes: int | None) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))  # those before may be a file's
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    torch.set_num_threads(1)
    in_one_chunk(main, arguments)
