"""The training run: training loop, rollout groups, checkpoints, metrics and loggers. Imports any part below `commands`.

The package is callable: `sparse_rl.train(config)` trains a run, see `api.py`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from .api import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _Callable
