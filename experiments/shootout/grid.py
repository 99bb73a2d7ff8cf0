"""The grid of arms.toml: the cache of every arm, what has no result yet, and about how long that takes. Imports no torch."""

import json
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.config import KV
from sparse_rl.sizes import AttentionShape, slot_bytes, store_bytes

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DENSE = "full"
SPAN = 256
"""Response tokens of a group of positions."""


@dataclass(frozen=True)
class Arm:
    name: str
    fields: dict[str, Any]
    """Options of `KV` beside the sizes."""
    share: float | None = None
    """Budget as a share of the task's longest held sequence, or of its longest response with a protected prompt."""
    saved: float | None = None
    """Share of the dense arm's bytes that the cache saves, with its side tables. It sets the budget in place of `share`."""
    recent: float | None = None
    """Share of the budget that the last tokens get."""
    order: tuple[int, int] = (0, 0)
    """Place in the list of budgets, and place in arms.toml. The lowest runs first."""

    def cache(self, task: dict[str, Any], bytes_of: Callable[[KV], float], dense_bytes: float) -> KV:
        """Return the arm's cache. `bytes_of` gives the bytes of a sequence in a cache, `dense_bytes` those of the dense arm."""
        if self.share is not None:
            whole = task["response_tokens"] + (0 if self.fields.get("protect_prompt") else task["prompt_tokens"])
            budget = max(32, 16 * round(self.share * whole / 16))
            return self._sized(budget, max(16, 16 * round(budget / 64)))
        if self.saved is None:
            return KV(**self.fields)
        target = (1 - self.saved) * dense_bytes
        sizes = range(48, task["prompt_tokens"] + task["response_tokens"])
        caches = [self._sized(size - interval, interval) for size in sizes for interval in [max(16, 16 * round(size / 80))]]
        if not bytes_of(caches[0]) <= target:
            raise ValueError(f"saved = {self.saved} is out of reach: a budget of {caches[0].budget} already takes more bytes.")
        return min(caches, key=lambda kv: abs(bytes_of(kv) - target))

    def _sized(self, budget: int, interval: int) -> KV:
        window = {} if self.recent is None else {"window": round(self.recent * budget)}
        return KV(**{"interval": interval} | self.fields | window | {"budget": budget})


def read_plan() -> dict[str, Any]:
    return tomllib.loads((HERE / "arms.toml").read_text())


def arms_of(plan: dict[str, Any], task: str) -> list[Arm]:
    """Return the arms of a task in the order in which they run: dense, every arm's first budget, every arm's second, …"""
    found = [Arm(DENSE, {"policy": DENSE}, order=(-1, 0))]
    for place, (name, given) in enumerate(plan["arms"].items()):
        fields = dict(given)
        budgets, saved, recent = (fields.pop(key, None) for key in ("budgets", "saved", "recent"))
        if saved is not None:
            shares = [in_task(saved, task)]
            found += [Arm(name, fields, saved=share, recent=recent, order=(0, place)) for share in shares if share is not None]
        elif budgets is None:
            found.append(Arm(name, fields, order=(0, place)))
        else:
            for number, share in enumerate(in_task(budgets, task) or []):
                found.append(Arm(f"{name} {share:g}", fields, share, recent=recent, order=(number, place)))
    return sorted(found, key=lambda arm: arm.order)


def in_task(value: Any, task: str) -> Any:
    """Return the value for a task, if the arm names one per task; None if it leaves the task out."""
    return value.get(task) if isinstance(value, dict) else value


def chosen_tasks(plan: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the tasks of these names. `all` are those that are not a trial of the script."""
    if "all" in names:
        return [name for name, task in plan["tasks"].items() if not task.get("trial")]
    if unknown := [name for name in names if name not in plan["tasks"]]:
        raise ValueError(f"{unknown[0]} is not a task of arms.toml: choose from {', '.join(plan['tasks'])} or all.")
    return list(names)


def row_names(plan: dict[str, Any]) -> list[str]:
    """Return the names of all arms in the order of arms.toml, the smallest budget first."""
    arms = {arm.name: arm for task in plan["tasks"] for arm in arms_of(plan, task)}
    return sorted(arms, key=lambda name: (name != DENSE, arms[name].order[1], arms[name].share or 0))


def file_of(folder: Path, task: str, arm: str) -> Path:
    return folder / task / f"{arm.replace('/', '-').replace(' ', '_')}.json"


def missing(plan: dict[str, Any], tasks: Sequence[str], folder: Path, wanted: Sequence[str] = ("",)) -> list[tuple[str, Arm]]:
    """Return (task, arm) without a result in `folder`, the most valuable first: dense, then arms in order, on all tasks.

    Arms other than dense are left out unless their name contains one of `wanted`.
    """
    found = [
        (task, arm)
        for task in tasks
        for arm in arms_of(plan, task)
        if arm.name == DENSE or any(part in arm.name for part in wanted)
        if not file_of(folder, task, arm.name).exists()
    ]
    return sorted(found, key=lambda pair: pair[1].order)


def usual_seconds(folder: Path, task: str) -> float | None:
    """Return the median seconds of the task's results. Results without `seconds` give those of decoding beside other arms,
    which are about as many as a whole arm takes alone."""
    rows = [json.loads(path.read_text()) for path in (folder / task).glob("*.json") if path.name != "task.json"]
    return statistics.median(row.get("seconds", row["decode_s"]) for row in rows) if rows else None


def cache_bytes(kv: KV, shape: AttentionShape, itemsize: int, prompts: int, longest: int, slots: int, samples: int) -> float:
    """Return the bytes of one sequence: its slot, its side tables and its share of a store of `prompts` prompts."""
    store = store_bytes(shape, [longest] * prompts, slots, samples, itemsize, kv.dtype) if kv.stores_prompts else (0, 0)
    return sum(slot_bytes(shape, kv, itemsize)) + sum(store) / slots
