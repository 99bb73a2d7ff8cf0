"""Record the conditions of a benchmark in its JSON: date, machine and versions."""

import datetime
import os
import platform
from typing import Any

import torch
import transformers

from .. import __version__


def environment(benchmark: str, device: torch.device) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sparse_rl": __version__,
        },
    }
