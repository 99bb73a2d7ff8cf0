"""Join the ranks that torchrun or Ray started, and reject configurations that several ranks cannot run."""

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import __version__
from ..config import Config
from ..errors import RankLost, UserError, first_line
from ..format import counted, gib
from ..plan.dimensions import dimensions
from ..plan.parts import weight_bytes
from ..plan.remedies import TOO_LARGE
from ..world import ALONE, LOST, World
from .lock import process_name
from .refusal import RefusalWatcher, refuse_again
from .resume import options_of


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """Yield the World of this process: `ALONE`, or the world of all ranks if a launcher started several."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available() and config.model.device in (None, "cuda")
    timeout = timedelta(seconds=config.ranks.timeout_s)
    started = not dist.is_initialized()  # under Ray, torch.distributed is initialized and the GPU is already set
    if started and on_gpu:
        torch.cuda.set_device(gpu_of(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
    whole, _launcher = fresh_store(rank, size, timeout) if started else (dist.distributed_c10d._get_default_store(), None)
    store = dist.PrefixStore(f"run-{next(RUNS)}", whole)
    with RefusalWatcher(store, rank, size) as watch:
        if started:
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=whole, rank=rank, world_size=size, timeout=timeout)
        try:
            with watch.publishing(), lost_ranks_named():
                world = World(rank, size, dist.new_group(backend="gloo", timeout=timeout), store, timeout)
                refuse_differences(world, config)
                refuse_uneven_groups(world, config)
                yield world
        finally:
            if started:
                dist.destroy_process_group()


def gpu_of(local_rank: int, gpus: int) -> int:
    """Return the GPU index of a rank. Raise UserError if the machine has fewer GPUs than ranks."""
    if local_rank >= gpus:
        raise UserError(
            f"This machine has {counted(gpus, 'GPU')} but at least {local_rank + 1} ranks: start at most one "
            f"rank per GPU, with --nproc-per-node {gpus}."
        )
    return local_rank


RUNS = itertools.count()
"""Counter of the runs started in this process. All ranks have the same count, so it prefixes the keys of one run."""


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Turn the error that a lost rank causes in the block into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if not LOST.search(str(error)):  # match the message, because gloo raises a plain RuntimeError
            raise
        raise RankLost(
            f"Another rank was lost during a step ({first_line(error)}): see the output of that rank. With torchrun "
            "--max-restarts, the run continues from the last checkpoint."
        ) from error


def fresh_store(rank: int, size: int, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """Wait until all ranks have joined, then return (a new store for this start, the launcher's store).

    The caller must keep a reference to the launcher's store while it uses the new store. The launcher's store cannot be used
    for training: torchrun keeps it across restarts, with entries of lost ranks, and each node counts restarts separately.
    Rank 0 therefore opens a new store and publishes its address in the launcher's store. A published store that does not
    answer, or that all ranks have already joined, belongs to an earlier start and is ignored.
    """
    known = next(dist.rendezvous("env://", timeout=timeout))[0]
    refuse_again(known)
    ends = time.monotonic() + timeout.total_seconds()
    store: dist.TCPStore | None = None
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        store.add("here", 1)
        known.set("sparse_rl_store", f"{address()} {store.port}")
    while True:
        try:
            if store is None and known.check(["sparse_rl_store"]):
                host, port = known.get("sparse_rl_store").decode().split()
                found = dist.TCPStore(host, int(port), size, timeout=STORE_TIMEOUT, wait_for_workers=False)
                store = found if found.add("here", 1) <= size else None
            if store is not None and store.add("here", 0) >= size:
                store.set_timeout(timeout)
                return store, known
        except RuntimeError:
            store = None
        refuse_again(known)
        if time.monotonic() > ends:
            raise RankLost(
                f"Not all {size} ranks have started within the time limit (ranks.timeout_s = {timeout.total_seconds():g})."
            )
        time.sleep(0.1)


def address() -> str:
    """Return the IP address at which other ranks can reach this rank.

    It is the local address of a connection to MASTER_ADDR. If that is a loopback address, return MASTER_ADDR.
    """
    master = os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends no packet
        probe.connect((master, int(os.environ["MASTER_PORT"])))
        mine = probe.getsockname()[0]
    return master if mine.startswith("127.") else mine


STORE_TIMEOUT = timedelta(seconds=5)
"""Time after which a store that has not answered counts as gone."""


def launch() -> str:
    """Return an id that all restarts by one torchrun command share; empty without torchrun.

    The id is torchrun's --rdzv-id. Without --rdzv-id, torchrun uses "none" for every launch, so the parent process is added.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} {process_name(os.getppid())}" if name == "none" else name


def refuse_too_large(config: Config, memory_bytes: int) -> None:
    """Raise UserError if the weights exceed the GPU's memory, before loading them. Skip models of unknown shape."""
    try:
        dims = dimensions(config.model.path)
    except UserError:
        return
    weights = weight_bytes(config, dims)
    if weights > memory_bytes:
        raise UserError(
            f"{config.model.path} has {gib(weights)} GiB of weights, but the GPU has {gib(memory_bytes)} GiB: {TOO_LARGE}."
        )


def refuse_differences(world: World, config: Config) -> None:
    """Raise UserError if ranks have different versions or options."""
    mine = {"the version of sparse-rl": __version__, "the version of torch": torch.__version__}
    mine |= options_of(config)
    first, *others = world.gather(mine)
    for rank, theirs in enumerate(others, 1):
        for key in sorted(first.keys() | theirs.keys()):
            if first.get(key) != theirs.get(key):
                raise UserError(
                    f"{key} is {theirs.get(key, 'not set')} on rank {rank} and {first.get(key, 'not set')} on rank 0: "
                    "start all ranks with the same installation, recipe and flags."
                )


def refuse_uneven_groups(world: World, config: Config) -> None:
    prompts = config.rollout.prompts_per_step
    if prompts % world.size:
        fits = max(1, round(prompts / world.size)) * world.size
        raise UserError(
            f"rollout.prompts_per_step = {prompts} is not divisible by {world.size} ranks: "
            f"try --rollout.prompts-per-step {fits}."
        )
    if torch.cuda.is_available():
        refuse_too_large(config, torch.cuda.mem_get_info()[1])
    if config.optimizer.state == "offload" and not config.model.lora.rank:
        raise UserError("optimizer.state = offload supports only one GPU: remove it. Several ranks shard the optimizer state.")
    if config.model.routing_replay:
        raise UserError("model.routing_replay = true supports only one rank: set it to false, or start one rank.")
