"""Decide which options may change when a run is resumed, and report the changes.

A checkpoint records a digest of the training problems and the settings behind its best score. A resumed run must use the same
problems. If the score settings differ, earlier scores are discarded and the best checkpoint is chosen again.
"""

import hashlib
import json
import tomllib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import FORMAT, TASK_REWARDS, Config, flat, migrated, refuse_total_budget, to_toml
from ..config.kv import PREDICTS_QUERIES, SCORING_WINDOW
from ..data.examples import Example, name_of
from ..errors import UserError
from ..format import counted

FREE_OPTIONS = ("run_dir", "compare", "checkpoint.", "log.", "eval.", "reward.", "alerts.", "ranks.", "ray.")
"""Prefixes of options that may change without a note. `other_score` handles changes of `reward` and `checkpoint.best`."""
NOTED_OPTIONS = (
    "steps",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.tokens_per_microbatch",
    "optimizer.gradient_checkpointing",
    "optimizer.max_skipped_updates",
    "rollout.slots",
    "kv.target_rejected",
)
"""Options that may change. The run prints the change and records it in config.toml."""
EARLIER_VALUE = "# until step"
"""Prefix of a comment in config.toml that records an earlier value."""
SPEED = ("workers", "timeout_s")
"""Options of `reward` that the score does not depend on."""


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    now: Any

    def until(self, step: int) -> str:
        """Return the comment for config.toml, e.g. `# until step 100: optimizer.lr = 1e-06`."""
        return f"{EARLIER_VALUE} {step}: {self.key} = {self.before}\n"


def changes(name: Any, before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the changes of `NOTED_OPTIONS`. Raise UserError for an option that may not change.

    `before` and `now` map dotted keys, such as `kv.budget`, to values.
    """
    before, now = _with_window(before), _with_window(now)
    differ = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    fixed = [key for key in differ if key not in NOTED_OPTIONS and not key.startswith(FREE_OPTIONS)]
    if fixed:
        found = ", ".join(f"{key} is {now.get(key, 'not set')} now but was {before.get(key, 'not set')}" for key in fixed)
        raise UserError(
            f"{found} in {name}: resume with the same {'value' if len(fixed) == 1 else 'values'}, or start a new run with another "
            "--run-dir."
        )
    return [Change(key, before.get(key), now.get(key)) for key in differ if key in NOTED_OPTIONS]


def _with_window(options: dict[str, Any]) -> dict[str, Any]:
    """Replace `kv.window = auto` by its number, unless it follows the budget. Older versions stored that number."""
    if options.get("kv.window") != "auto" or options.get("kv.policy") in PREDICTS_QUERIES:
        return options
    return options | {"kv.window": SCORING_WINDOW}


def options_of(config: Config) -> dict[str, Any]:
    """Return every option that is set, by its dotted key, such as `kv.budget`."""
    return flat(tomllib.loads(to_toml(config)))


def kept_options(config: Config) -> dict[str, Any]:
    """Return the options that a checkpoint stores: all except `FREE_OPTIONS`."""
    kept = {key: value for key, value in options_of(config).items() if not key.startswith(FREE_OPTIONS)}
    return kept | {"format": FORMAT}


def changes_since(checkpoint: Any, before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the changes against the options of a checkpoint. Ignore options that the checkpoint's version did not have."""
    refuse_total_budget(before, "start a new run with another --run-dir and --kv.budget {}")
    before = migrated(before)
    return changes(checkpoint, before, {key: value for key, value in now.items() if key in before})


def change_notes(changed: Sequence[Change], step: int, config: Config, lr: float) -> list[str]:
    """Return sentences about the options that change after `step`. `lr` is the learning rate of the next step."""
    lines = [
        f"{each.key} is {each.now} from step {step + 1} on, and was {each.before}." for each in changed if each.key != "steps"
    ]
    steps = next((each for each in changed if each.key == "steps"), None)
    if steps and config.optimizer.schedule != "constant":
        lines.append(
            f"steps is {steps.now} now but was {steps.before}: the {config.optimizer.schedule} schedule is stretched. Step {step + 1} has the "
            f"learning rate {lr:.3g}, so the result differs from a single run of {steps.now} steps."
        )
    return lines


def problem_digest(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the number of problems (`count`) and a digest of their token ids, in order (`prompts`)."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in prompts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return {"count": len(prompts), "prompts": digest.hexdigest()}


def answer_digest(examples: Sequence[Example]) -> str:
    """Return a digest of the answers and the extra columns that rewards receive."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(
            json.dumps([example.answer, example.columns], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        )
    return digest.hexdigest()


def scored_by(config: Config, examples: Sequence[Example], held_out: Mapping[str, Sequence[Example]]) -> dict[str, str]:
    """Return the settings, other than the weights, that the metric `checkpoint.best` depends on, by option name.

    `held_out` maps the source of each held-out set to its problems.
    """
    best, data = config.checkpoint.best, config.data
    found = {"checkpoint.best": best}
    for key, value in config.reward.model_dump(mode="json").items():
        if key not in SPEED:
            found[f"reward.{key}"] = str(value)
    source = data.train
    if best.startswith("eval/"):
        scored = next((each for each in data.held_out if best.startswith(f"eval/{name_of(each)}/")), None)
        source = scored or next(iter(data.held_out), "")
        examples = held_out.get(source, [])
    found["reward.function"] = config.reward.function or TASK_REWARDS.get(source, "")
    found[f"the answers of {source}"] = answer_digest(examples)
    return found


def refuse_other_problems(source: str, before: dict[str, Any], now: dict[str, Any], step: int) -> None:
    if not before or before == now:
        return
    remedy = "Restore the file, or start a new run with another --run-dir."
    if before.get("count") != now["count"]:
        had = f"{counted(now['count'], 'problem')} now but had {before.get('count'):,} at step {step}"
        raise UserError(f"{source} has {had}: the run would continue with different problems in a different order. {remedy}")
    raise UserError(
        f"The prompts of {source} differ from those of step {step}: its rows, their order or the chat template changed. {remedy}"
    )


def other_score(before: dict[str, str], now: dict[str, str], step: int) -> str:
    """Return a warning if the score settings in `before` and `now` differ; else an empty string."""
    differ = [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]
    differ += sorted(before.keys() ^ now.keys())
    if not before or not differ:
        return ""
    key = differ[0]
    what = f"{key} is {now.get(key, 'not set')} now but was {before.get(key, 'not set')}"
    if key.startswith("the answers of"):
        what = (
            f"{key} or their columns differ from those of step {step}"
            if key in now and key in before
            else "the scored problems changed"
        )
    return f"{what[0].upper() + what[1:]}: scores before and after step {step} cannot be compared, and the best checkpoint is chosen again."
