"""Write the JSON of a benchmark, with its conditions: date, machine and versions."""

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..terminal import Terminal


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


def write_record(file: Path | None, record: dict[str, Any], console: Terminal) -> None:
    """Write the record of a benchmark to `file`, if given."""
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")
        console.print_line(f"Written to {file}.")
