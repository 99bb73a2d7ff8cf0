"""Run `sparse-rl train RECIPE --ray.workers N` on Ray Train, which places the ranks and restarts them.

The driver checks the run folder once. The first start of the workers creates, replaces or resumes the run. Every later start
resumes it, if the run has started.
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any

from pyarrow.fs import FSSpecHandler, PyFileSystem

from ..config import Config
from ..errors import RankLost, Refused, UserError, first_line, notice, quiet_packages
from ..rewards.find import refuse_inside_a_reward
from ..train.refusal import is_final
from ..train.run import refuse_folders
from ..train.run_folder import RunFolder
from ..train.storage import opened


def train(config: Config, *, resume: bool, overwrite: bool) -> None:
    refuse_inside_a_reward()
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise UserError("--ray.workers needs Ray: pip install 'sparse-rl[ray]'.") from error
    if config.compare:
        raise UserError("compare is not supported on Ray: pass one --method with --ray.workers.")
    settings, folder = config.ray, RunFolder(config.run_dir, writes=False)
    refuse_folders([config], config.run_dir, resume=resume, overwrite=overwrite)
    started = not ray.is_initialized()
    if started:
        _connect(ray, settings.address)
    try:
        gpus = settings.gpus_per_worker
        if gpus is None:
            gpus = 1 if ray.cluster_resources().get("GPU") else 0
        needs = {"CPU": settings.cpus_per_worker, "GPU": gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_resources(nodes, settings.workers, needs)
        if busy := busy_notice(ray.available_resources(), settings.workers, needs):
            notice(busy)
        run = folder.name.absolute() if isinstance(folder.name, Path) else folder.name
        values = config.model_dump(by_alias=True, exclude={"ray"}) | {"run_dir": str(run)}
        fs, path = opened(run)
        state = f"{os.path.dirname(path.rstrip('/'))}/.ray"  # files that Ray and the workers leave for the driver
        refusal = f"{state}/{folder.path.name}.refused"
        fs.makedirs(state, exist_ok=True)
        if fs.exists(refusal):
            fs.rm_file(refusal)
        trainer = TorchTrainer(
            _rank,
            train_loop_config={
                "config": values,
                "cwd": os.getcwd(),
                "refusal": refusal,
                "start": {"resume": resume, "overwrite": overwrite, "launch": uuid.uuid4().hex},
            },
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo", timeout_s=int(config.ranks.timeout_s)),
            scaling_config=ScalingConfig(num_workers=settings.workers, use_gpu=bool(gpus), resources_per_worker=needs),
            run_config=RunConfig(
                name=folder.path.name,
                storage_path=state,
                storage_filesystem=PyFileSystem(FSSpecHandler(fs)) if folder.remote else None,
                failure_config=FailureConfig(max_failures=settings.max_failures),
            ),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise _sentence(error) from error
        fs.invalidate_cache()
        if fs.exists(refusal):
            raise Refused(**json.loads(fs.cat_file(refusal)))
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, log_to_driver=True, configure_logging=False)
    except ConnectionError as error:
        raise UserError(
            f"No Ray cluster is reachable at {address}: start one with `ray start --head`, or omit --ray.address."
        ) from error


def check_resources(nodes: list[dict[str, float]], workers: int, needs: dict[str, float]) -> None:
    """Raise if the cluster has too few resources in total, because Ray would wait forever."""
    required = {name: count for name, count in needs.items() if count}
    places = sum(int(min(node.get(name, 0) // count for name, count in required.items())) for node in nodes)
    if places < workers:
        each = " and ".join(f"{count:g} {name}" for name, count in required.items())
        there = "; ".join(" and ".join(f"{node.get(name, 0):g} {name}" for name in required) for node in nodes)
        raise UserError(
            f"ray.workers = {workers} is too many: a worker needs {each}, and the nodes of the Ray cluster ({there}) "
            f"have room for {places}: add nodes, or lower --ray.workers or the resources per worker."
        )


def busy_notice(free: dict[str, float], workers: int, needs: dict[str, float]) -> str | None:
    """Return a message if resources are in use by others, for which Ray waits silently; else None."""
    short = [
        f"{free.get(name, 0):g} of {workers * count:g} {name}"
        for name, count in needs.items()
        if free.get(name, 0) < workers * count
    ]
    return (
        f"The Ray cluster is busy (free: {' and '.join(short)}): the run starts when all of them are free." if short else None
    )


def _rank(values: dict[str, Any]) -> None:
    """Run training on one worker."""
    import ray.train

    from ..train import run

    quiet_packages()
    if Path(values["cwd"]).is_dir():  # paths of data and models are relative to this folder
        os.chdir(values["cwd"])
    config = Config(**values["config"])
    fs, _ = opened(RunFolder(config.run_dir, writes=False).name)
    if fs.exists(values["refusal"]):  # written by an earlier start that could not end its workers otherwise
        return
    try:
        run.train(config, **values["start"])
    except UserError as error:
        if not is_final(error):
            raise
        rank = error.rank if isinstance(error, Refused) else ray.train.get_context().get_world_rank()
        # not reported to Ray as a failure
        fs.pipe_file(values["refusal"], json.dumps({"rank": rank, "sentence": str(error)}).encode())


def _sentence(error: BaseException) -> UserError:
    """Return the error of the first worker that failed for a reason other than a lost rank."""
    failures = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        cause = getattr(failure, "cause", None) or failure.__cause__ or failure
        if not isinstance(cause, RankLost):  # report the cause, not a rank that only noticed it
            return UserError(f"Rank {rank} failed on Ray ({first_line(cause)}): see the logs of the run and the Ray logs.")
    return UserError(
        f"The ranks failed on Ray ({str(error).strip().splitlines()[-1]}): see the logs of the run and the Ray logs."
    )
