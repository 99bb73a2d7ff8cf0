"""The settings that the results of an evaluation depend on, and hashes of its data, weights and rewards."""

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import FORMAT, KV, DataConfig, RewardConfig
from ..rewards.weighted_sum import terms
from .compare import Setting
from .mismatch import Criteria
from .sources import BenchmarkSource


def identity(
    args: argparse.Namespace,
    settings: Sequence[Setting],
    sources: Sequence[BenchmarkSource],
    data: DataConfig,
    reward: RewardConfig,
    criteria: Criteria,
    dtype: str,
) -> dict[str, Any]:
    """Return all settings that the results depend on, for asked.json. Settings that affect only speed are left out."""
    return {
        "model": args.model,
        "weights": weights_hash(args.model),
        "dtype": dtype,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "mismatch": args.mismatch,
        "template": data.template,
        "raw": data.raw,
        "reward.truncated": reward.truncated,
        "reward.timeout": reward.timeout,
        "settings": {setting.name: stored_settings(setting.kv) for setting in settings},
        **({"correction": criteria.rules} if criteria.rules else {}),
        **({"format": FORMAT} if any(setting.kv.stores_prompts for setting in settings) else {}),
        "benchmarks": {
            source.name: {
                "source": source.path,
                "problems": len(source.examples),
                "contents": _hash([(each.prompt, each.columns, each.template) for each in source.examples]),
                "samples_per_prompt": source.samples,
                "max_tokens": source.sampling.max_tokens,
                "reward": source.reward,
                "reward_contents": reward_hash(source.reward),
            }
            for source in sources
        },
    }


def stored_settings(kv: KV) -> dict[str, Any]:
    """Return the settings for asked.json. Evaluations of earlier versions have no dtype."""
    return kv.model_dump(mode="json", exclude={"target_rejected"} | (set() if kv.quantised else {"dtype"}))


def weights_hash(model: str) -> str | None:
    """Return a hash of the names, sizes and modification times of the model's files, to detect changed weights.

    Return None if `model` is not on disk.
    """
    path = Path(model)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files = [file for file in found if file.is_file()]  # skip links to themselves; loading raises an error for them
    return _hash([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]) if files else None


def reward_hash(function: str) -> str | None:
    """Return a hash of the Python files that the reward uses, to detect changed code. None for built-in rewards."""
    files = [Path(term.function.rpartition(":")[0]) for term in terms(function) if ".py:" in term.function]
    return _hash([file.read_text() for file in files if file.is_file()]) if files else None


def _hash(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def default_folder(model: str, asked: dict[str, Any]) -> Path:
    """Return the default of --out. The same model and settings always give the same folder."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-.")
    return Path("runs/eval") / f"{name}-{_hash(asked)[:8]}"
