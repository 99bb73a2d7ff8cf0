"""Log metrics to TensorBoard, W&B and trackio, in addition to metrics.jsonl."""

import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..config import Config
from ..errors import LoggerUnavailable, UserError, first_line
from .run_folder import write_whole


class Logger(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats some steps; purge_step hides their earlier values.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)
        self.writer.add_text("config", f"```json\n{config.model_dump_json(indent=1)}\n```")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """Logger for wandb and trackio, which share one interface."""

    def __init__(self, module: Any, folder: Path, config: Config, **options: Any):
        project = os.environ.get(f"{module.__name__.upper()}_PROJECT", "sparse-rl")
        name = f"{folder.name}-{run_id(folder)[:6]}"
        self.run = module.init(project=project, name=name, config=config.model_dump(mode="json"), **options)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def _wandb(folder: Path, config: Config, first_step: int) -> Logger:
    import wandb

    return WandbLike(wandb, folder, config, dir=str(folder), resume="allow", id=run_id(folder))


def _trackio(folder: Path, config: Config, first_step: int) -> Logger:
    import trackio

    return WandbLike(trackio, folder, config, resume="allow")


def run_id(folder: Path) -> str:
    """Return the run's id, created at its first start and stored in its folder. A resumed run logs under the same id."""
    file = folder / "run-id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex)
    return file.read_text()


@contextmanager
def opened_loggers(folder: Path, config: Config, first_step: int) -> Iterator[list[Logger]]:
    """Yield the loggers listed in `log.to`, and close them at the end. `first_step` is the first step the run will log."""
    loggers: list[Logger] = []
    with ExitStack() as opened:
        for name in config.log.to:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    make = {"tensorboard": TensorBoard, "wandb": _wandb, "trackio": _trackio}[name]
                    loggers.append(make(folder, config, first_step))
            except ImportError as error:
                raise UserError(f"log.to = {name} needs an optional package: pip install 'sparse-rl[{name}]'.") from error
            except Exception as error:  # each logger has its own errors: no key, no network, no space
                raise LoggerUnavailable(
                    f"log.to = {name} could not start ({type(error).__name__}: {first_line(error)}): fix the cause, or omit {name}."
                ) from error
            opened.callback(loggers[-1].close)
        yield loggers
