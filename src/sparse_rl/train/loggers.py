"""Log metrics to TensorBoard, W&B and trackio through one small interface, beside metrics.jsonl."""

import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..config import Config
from ..errors import UserError
from .run_folder import write_whole


class Logger(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes some steps again; purge_step hides the earlier ones.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)
        self.writer.add_text("config", f"```json\n{config.model_dump_json(indent=1)}\n```")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """Logger for wandb, and for trackio, which has the same interface."""

    def __init__(self, module: Any, folder: Path, config: Config, **how: Any):
        project = os.environ.get(f"{module.__name__.upper()}_PROJECT", "sparse-rl")
        name = f"{folder.name}-{run_id(folder)[:6]}"
        self.run = module.init(project=project, name=name, config=config.model_dump(mode="json"), **how)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def _tensorboard(folder: Path, config: Config, first_step: int) -> Logger:
    return TensorBoard(folder, config, first_step)


def _wandb(folder: Path, config: Config, first_step: int) -> Logger:
    import wandb

    return WandbLike(wandb, folder, config, dir=str(folder), resume="allow", id=run_id(folder))


def _trackio(folder: Path, config: Config, first_step: int) -> Logger:
    import trackio

    return WandbLike(trackio, folder, config, resume="allow")


def run_id(folder: Path) -> str:
    """Return the id of the run, drawn at its start and kept in its folder. A resumed run continues under the same id."""
    file = folder / "run-id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex)
    return file.read_text()


@contextmanager
def opened_loggers(folder: Path, config: Config, first_step: int) -> Iterator[list[Logger]]:
    """Open the loggers that log.to names, for a run that continues with `first_step`."""
    loggers: list[Logger] = []
    with ExitStack() as opened:
        for name in config.log.to:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    make = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}[name]
                    loggers.append(make(folder, config, first_step))
            except ImportError as error:
                raise UserError(f"log.to = {name} needs a package: pip install 'sparse-rl[{name}]'.") from error
            opened.callback(loggers[-1].close)
        yield loggers
