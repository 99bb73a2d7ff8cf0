"""Write the model card of a run: method, KV budget, held-out scores, curves, recipe and versions."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from statistics import fmean
from typing import Any

from .. import __version__
from ..config import KV, SHADOW_METHODS, TASKS, Config
from ..format import counted, size
from ..hub import is_hub_id
from ..report.figures import CURVES
from ..scores import are_shares, score_keys, score_name, score_set, score_text
from ..text import printable
from .summary import PEAKS, peak

BARS = "▁▂▃▄▅▆▇█"
BUCKETS = 30
"""Maximum characters of a curve."""
MACHINE = ("run_dir", "compare", "ranks", "ray", "log")
"""Options of the machine, which a card leaves out."""
KEEPS_ALL_OPTIONS = ("policy", "dtype")
"""Options of the `kv` section that have an effect under kv.policy = full."""
PATHS = {"model": ("path",), "data": ("train", "test", "dir"), "reward": ("function",)}
"""Options that may hold paths of the machine. A card shows only their last part."""
Row = dict[str, float]


def model_card(config: Config, kv: KV, rows: Sequence[Row], step: int, name: str, *, merge: bool = False) -> str:
    """Return the text of README.md for the weights of one step. `rows` are the run's metrics, `name` is a hub id or a folder.

    `kv` is the sampler's cache at that step. Its budget is a number, also if the run sets it itself.
    """
    rows = [row for row in rows if row["step"] <= step]
    adapter = bool(config.model.lora.rank) and not merge
    parts = [
        f"---\n{_metadata(config, adapter)}\n---\n",
        f"# {_cell(name.rpartition('/')[2])}\n\n{_summary(kv)}\n",
        _table(("", ""), _facts(config, kv, rows, step, merge)),
        _scores(kv, rows),
        _curves(kv, rows),
        f"## Use\n\n{_use(kv, name, adapter)}",
        f"## Recipe\n\nOptions that differ from the defaults:\n\n```toml\n{_recipe(config)}```\n",
    ]
    return "\n".join(part for part in parts if part)


def _metadata(config: Config, adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    base, source = config.model.path, config.data.train
    origin = TASKS[source].train if source in TASKS else None
    dataset = origin.hub.id if origin and origin.hub else source.split(":")[0]
    metadata: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["sparse-rl", "reinforcement-learning", config.loss.name],
    }
    metadata |= {"base_model": base} if is_hub_id(base) else {}
    metadata |= {"datasets": [dataset]} if is_hub_id(dataset) else {}
    return ModelCardData(**metadata).to_yaml()


def _summary(kv: KV) -> str:
    bits = f" in {kv.dtype.removesuffix('bit')} bits" if kv.quantised else ""
    prompts = ", plus the prompt" if kv.stores_prompts else ""
    cache = f"a KV cache of at most {kv.capacity:,} tokens per layer and head{bits}{prompts}"
    if kv.policy == "full":
        cache = f"a KV cache with all keys{bits}" if bits else "a dense KV cache"
    return f"Trained by reinforcement learning with sparse-rl. Rollouts ran on {cache}."


def _facts(config: Config, kv: KV, rows: Sequence[Row], step: int, merge: bool) -> list[tuple[str, str]]:
    lora, rollout = config.model.lora, config.rollout
    correction = "none" if config.method in SHADOW_METHODS else config.correction.preset or config.default_preset
    changed = " with changed options" if config.correction.model_dump(exclude={"preset"}, exclude_none=True) else ""
    weights = f"LoRA rank {lora.rank}, {'merged into the weights' if merge else 'adapter'}" if lora.rank else "all weights"
    weights += ", trained on base weights in 4 bits (NF4)" if lora.base == "4bit" else ""
    held, dense = (peak(list(rows), key) for key in PEAKS)
    packages = ["torch", "transformers", *(["peft"] if lora.rank else [])]
    facts = [
        ("base model", _short(config.model.path)),
        ("trained", weights),
        ("problems", _short(config.data.train)),
        ("reward", _short(config.reward.function_for(config.data.train))),
        ("method, correction", f"{config.method}, {correction}{changed}"),
        ("KV cache of the sampler", f"{kv.label}, budget set by the run" if config.sets_budget else kv.label),
        ("KV memory", f"{size(held)} allocated at most; a dense cache would have held {size(dense)}" if held else ""),
        ("step", f"{step} of {config.steps}"),
        (
            "batch",
            f"{counted(rollout.prompts_per_step, 'prompt')} x {rollout.samples_per_prompt} rollouts of at most "
            f"{rollout.max_tokens:,} tokens",
        ),
        ("loss, learning rate", f"{config.loss.name}, {config.optimizer.lr:g}"),
        ("seed", str(config.seed)),
        ("written with", ", ".join([f"sparse-rl {__version__}", *(f"{name} {version(name)}" for name in packages)])),
    ]
    return [(what, value) for what, value in facts if value]


def _scores(kv: KV, rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in score_keys(row)))
    if not keys:
        return ""
    share, lines = are_shares(rows), []
    for key in keys:
        scored = [row for row in rows if key in row]
        cache = kv.label if key.endswith("_sparse") else "dense"
        ends = [
            score_text(row[key], row.get(f"{key}_low"), row.get(f"{key}_high"), share=share) for row in (scored[0], scored[-1])
        ]
        lines.append((score_set(key), cache, ends[0], f"{ends[1]} (step {scored[-1]['step']:g})"))
    heading = f"## Held-out {score_name(share)}\n\n95 % intervals in brackets.\n\n"
    return heading + _table(("set", "cache", "before", "after"), lines)


def _curves(kv: KV, rows: Sequence[Row]) -> str:
    lines = []
    for key, label in CURVES.values():
        if key == "kv/budget" and kv.policy == "full":
            continue  # the metric is then the longest sequence that the cache holds
        values = [row[key] for row in rows if key in row and row["step"] > 0]
        if values:
            lines.append((label, f"{values[0]:.3g}", f"`{sparkline(values)}`", f"{values[-1]:.3g}"))
    return f"## Curves\n\n{_table(('metric', 'first step', 'steps', 'last step'), lines)}" if lines else ""


def sparkline(values: Sequence[float], width: int = BUCKETS) -> str:
    """Return the values as a line of bars from their minimum to their maximum, each the mean of its share of the values."""
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _use(kv: KV, name: str, adapter: bool) -> str:
    shown = name.replace('"', "")
    needs = "  # needs peft" if adapter else ""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{shown}"){needs}',
        f'tokenizer = AutoTokenizer.from_pretrained("{shown}")',
        "```\n",
    ]
    if kv.is_sparse:
        lines += ["With the KV cache of its training:\n", "```text", f'sparse-rl generate {shown} "a prompt"', "```\n"]
    return "\n".join(lines)


def _recipe(config: Config) -> str:
    import tomli_w

    values = config.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True, exclude=set(MACHINE))
    if config.sampler_kv.policy == "full":
        used = () if config.method == "dense" else KEEPS_ALL_OPTIONS
        effective = {key: value for key, value in values.pop("kv", {}).items() if key in used}
        values |= {"kv": effective} if effective else {}
    for section, keys in PATHS.items():
        for key in keys:
            if found := values.get(section, {}).get(key):
                values[section][key] = [_short(each) for each in found] if isinstance(found, list) else _short(found)
    return tomli_w.dumps(values)


def _short(text: str) -> str:
    """Return the text with absolute paths cut to their last part, so that a card does not show the folders of a machine."""
    return re.sub(r"(?<![\w.:/~-])[/~](?:[^\s/:]*/)*(?=[^\s/])", "", text)


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *([_cell(each) for each in line] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(text: str) -> str:
    return re.sub(r"([|<\[\]*_])", r"\\\1", printable(text, 200)) if not text.startswith("`") else text
