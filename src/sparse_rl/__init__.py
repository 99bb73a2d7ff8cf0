"""sparse-rl: reinforcement learning for language models whose rollouts run on a compressed, bounded KV cache."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "config",
    "Engine": "rollout.engine",
    "KV": "config",
    "NEVER": "kv.trace",
    "Rollout": "rollout.rollout",
    "Sampling": "config",
    "TrainResult": "train.result",
    "Trainer": "train.api",
    "UserError": "errors",
    "load_model": "models.load",
    "load_tokenizer": "models.load",
    "replay": "learner.replay",
    "train": "train.api",
}
__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from .config import KV as KV
    from .config import Config as Config
    from .config import Sampling as Sampling
    from .errors import UserError as UserError
    from .kv.trace import NEVER as NEVER
    from .learner.replay import replay as replay
    from .models.load import load_model as load_model
    from .models.load import load_tokenizer as load_tokenizer
    from .rollout.engine import Engine as Engine
    from .rollout.rollout import Rollout as Rollout
    from .train.api import Trainer as Trainer
    from .train.api import train as train
    from .train.result import TrainResult as TrainResult


def __getattr__(name: str):
    """Import a public name on first use, so that `sparse-rl --help` needs no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sparse_rl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
