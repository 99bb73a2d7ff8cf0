"""Ranks of one run, each in a process of its own, forked from one that has imported torch. No launcher watches over them."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from frames import in_one_chunk
from small_runs import CONTEXT
from sparse_rl.cli import main
from sparse_rl.config import Config
from sparse_rl.errors import UserError, say
from sparse_rl.train import refusal
from sparse_rl.train.distributed import joined
from sparse_rl.world import World


def run_ranks(folder: Path, work: Callable, *given, count: int = 2, seconds: float = 400) -> list[tuple[int | None, str]]:
    """Call `work(*given)` on every rank. Return (exit code, None if it had to be killed; what was printed) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    outputs = [folder / f"rank-{rank}.txt" for rank in range(count)]
    ranks = []
    for rank, output in enumerate(outputs):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(started(output, own, work, *given))
    ends = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, ends - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def started(output: Path, variables: dict[str, str], work: Callable, *given) -> BaseProcess:
    """Start `work(*given)` in a process with these environment variables."""
    process = CONTEXT.Process(target=_rank, args=(variables, output, work, given))
    process.start()
    return process


def _rank(variables: dict[str, str], output: Path, work: Callable, given: tuple) -> None:
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))
    torch.set_num_threads(1)
    in_one_chunk(work, *given)


# The work of a rank


def commands(*each: list[str]) -> None:
    """Commands of sparse-rl, one after the other."""
    dist.init_process_group("gloo")  # once for all of them, as Ray does
    for command in each:
        main(command)
    dist.destroy_process_group()


def torchrun(options: list[str], command: list[str]) -> None:
    """A command of sparse-rl under torchrun with these options. Its ranks are forked from this process."""
    config, _, _ = config_from_args(get_args_parser().parse_args([*options, "sparse-rl"]))
    config.start_method = "fork"
    elastic_launch(config, forked)(command)


def forked(command: list[str]) -> None:
    """A command with the signal handlers of a new program: a fork has those of torchrun, which raise an error of their own."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(command)


def launched(launch: str, command: list[str]) -> None:
    """A command of a torchrun launch with this id, which all its restarts share."""
    os.environ["TORCHELASTIC_RUN_ID"] = launch
    main(command)


def with_own_rates(command: list[str], *rates: str) -> None:
    """A command whose learning rate differs between ranks."""
    main([*command, "--optimizer.lr", rates[int(os.environ["RANK"])]])


def late() -> None:
    """The second rank comes after the time limit."""
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), 2, dist.new_group(backend="gloo"), timeout=timedelta(seconds=2))
    if world.rank:
        time.sleep(4)
    world.barrier()


def one_refuses() -> None:
    """Rank 1 refuses, rank 2 is stuck, the others wait."""
    refusal.GRACE_S, refusal.EXIT_TOGETHER_S = 0.5, 3.0
    try:
        with joined(Config(rollout={"prompts_per_step": 3})) as world:
            if world.rank == 1:
                raise UserError("There is no room.")
            if world.rank == 2:
                stuck = threading.Lock()
                stuck.acquire(), stuck.acquire()
            world.barrier()
    except UserError as error:
        say(str(error), getattr(error, "rank", None))
        os._exit(2)
