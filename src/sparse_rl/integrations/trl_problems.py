"""Convert TRL's flags about problems and rewards: the sections `data` and `reward` of a recipe."""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..format import counted
from ..text import printable, quoted
from .trl_parser import Flags

OVERLONG = ("get_soft_overlong_punishment", 1280, 256)
"""TRL's name, maximum length and range of its soft penalty on long completions."""
FILES = (".jsonl", ".parquet", ".csv")
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def data_section(flags: Flags) -> dict[str, Any]:
    name = flags["dataset_name"]
    if not name:
        raise UserError("The flags name no dataset: add --dataset_name. A mixture (datasets) must be written to one file.")
    config = flags["dataset_config"] or ""
    data: dict[str, Any] = {"train": _source(name, config, flags["dataset_train_split"])}
    if flags["eval_strategy"] != "no":
        data["test"] = _source(name, config, flags["dataset_test_split"])
    if kwargs := flags["chat_template_kwargs"]:
        data["chat_template_kwargs"] = _mapping(kwargs, "chat_template_kwargs")
    flags.notes.append(
        "TRL encodes prompts that are text verbatim, and sparse-rl with the chat template: set data.raw = true for text. Messages "
        "are encoded alike."
    )
    return data


def _source(name: str, config: str, split: str) -> str:
    """Return the source of a split: a hub dataset, or the file of the split in a folder."""
    if Path(name).is_dir():
        files = [path for suffix in FILES for path in sorted(Path(name).glob(f"**/{split}*{suffix}"))]
        if len(files) == 1:
            return str(files[0])
        raise UserError(
            f"--dataset_name {name} is a folder with {len(files)} files for the split {split}: write them to one file."
        )
    if name.count("/") != 1:
        raise UserError(f"--dataset_name {quoted(name)} is not a dataset of the hub: write owner/name, or a folder.")
    return f"{name}:{config}:{split}"


def _mapping(value: Any, name: str) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"--{name} {printable(value, 80)} is not valid JSON: write a JSON object.") from error
    if not isinstance(found, dict):
        raise UserError(f"--{name} {quoted(value)} is not a mapping: write a JSON object.")
    return found


def reward_section(flags: Flags, max_tokens: int) -> dict[str, Any]:
    names, weights = flags["reward_funcs"] or [], flags["reward_weights"]
    if not names:
        raise UserError(
            "The flags name no reward: add --reward_funcs, such as accuracy_reward or my_lib.rewards.custom_reward."
        )
    weights = weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise UserError(
            f"--reward_weights has {counted(len(weights), 'value')} for {counted(len(names), 'reward')}: pass one weight "
            "for each."
        )
    terms, overlong = [], False
    for name, weight in zip(names, weights, strict=True):
        if name == OVERLONG[0] and weight == 1.0 and max_tokens == OVERLONG[1]:
            overlong = True
            continue
        if name == OVERLONG[0]:
            flags.note(
                "reward_funcs", f"{name} is left out, because it counts from {OVERLONG[1]} tokens: set advantage.overlong"
            )
            continue
        where, _, function = name.rpartition(".")
        if not where and name not in TRL_REWARDS:
            raise UserError(
                f"--reward_funcs {name} is not a reward of TRL: use one of {', '.join(TRL_REWARDS)}, or a dotted path."
            )
        terms.append((f"{weight:g} * " if weight != 1.0 else "") + f"{where or 'trl.rewards'}:{function}")
    if not terms:
        raise UserError("The penalty on long completions is the only reward: add a reward that grades the answer.")
    # TRL grades completions that were cut off, too
    return {"function": " + ".join(terms), "truncated": "grade", **({"overlong": True} if overlong else {})}
