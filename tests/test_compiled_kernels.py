"""Kernels compile for GPUs that this machine does not have. Triton's interpreter accepts what its compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "compile_kernels.py"
CAPABILITY, SHARED = "86", 101_376
"""Compute capability of GPUs of 24 GB, and bytes of shared memory that a program may take there."""


def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, SCRIPT, CAPABILITY], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["shared"] <= SHARED for row in rows), rows
    named = {row["kernel"] for row in rows}
    assert {
        "_attend",
        "_attend_8bit",
        "_attend_4bit",
        "_attend_prompts",
        "_attend_prompt_codes",
        "_combine",
        "_decode",
        "_importance",
        "_similarities",
        "_logits",
    } <= named
    assert {"_keep", "_choose", "_draw", "_cut"} <= named
