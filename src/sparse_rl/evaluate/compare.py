"""Parse the caches of `--compare`, such as `full,rkv@512,snapkv@512+64`. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..config import KV
from ..errors import UserError

FORM = "full or POLICY@BUDGET[+INTERVAL], each with :8bit or :4bit if wanted, as in full,full:4bit,rkv@512,snapkv@512+64:8bit,rkv@auto"

TRAINED = ("window", "sinks", "protect_prompt", "options")
"""Options that a cache takes from the settings stored with the model, if it has the same policy."""


@dataclass(frozen=True)
class Setting:
    """A cache to evaluate."""

    kv: KV

    @property
    def name(self) -> str:
        """Name of the cache in tables, such as full, full:4bit, rkv@512 or rkv@512+64."""
        kv, name = self.kv, self.kv.policy
        if kv.policy != "full":
            name += f"@{kv.budget}" if kv.interval == default_interval(kv.budget) else f"@{kv.budget}+{kv.interval}"
        return f"{name}:{kv.dtype}" if kv.quantised else name


def settings(compare: str | None, given: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Setting]:
    """Return the caches to evaluate. `given` holds the --kv flags, which apply to every cache that evicts.

    Without --compare, return `full` and one more cache: the one of the --kv flags, or else the one stored with the model
    (`stored`). If neither is set, return only `full`.
    """
    if compare is None:
        found = [Setting(KV(policy="full"))]
        if {"policy", "budget", "dtype"} & given.keys() or KV(**{"policy": "full", **stored}).is_sparse:
            values = {**stored, **given}
            if "budget" in given and "interval" not in given:  # the stored interval belongs to the stored budget
                values["interval"] = default_interval(KV(budget=given["budget"], window=0, sinks=0).budget)
            kv = KV(**values)
            found += [Setting(kv)] if kv.is_sparse else []
        return found
    if twice := sorted({"policy", "budget"} & given.keys()):
        raise UserError(f"kv.{twice[0]} and --compare both set a cache: use only --compare, in the form {FORM}.")
    found = [_setting(part.strip(), given, stored) for part in compare.split(",")]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--compare lists {name} twice: list it once.")
    return found


def with_budget(setting: Setting, budget: int) -> Setting:
    return Setting(KV(**setting.kv.model_dump() | {"budget": budget}))


def default_interval(budget: int | Literal["auto"]) -> int:
    """Return the default interval for a budget: a quarter of it, at least 1. For auto, the interval of a training run."""
    return KV().interval if budget == "auto" else max(1, budget // 4)


def _setting(text: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> Setting:
    """Return the cache that `text` names. If the model was trained with the same policy, the stored options apply."""
    named = text
    text, _, dtype = text.rpartition(":") if text.endswith((":8bit", ":4bit")) else (text, "", "")
    given = {**given, "dtype": dtype} if dtype else given
    if text == "full":
        return Setting(KV(policy="full", dtype=dtype or "auto"))
    match = re.fullmatch(r"(.+)@(\d+|auto)(?:\+(\d+))?", text)
    if not match or match[1] == "full":
        raise UserError(f"--compare {text} is not a valid cache: use {FORM}.")
    trained = {name: stored[name] for name in TRAINED if name in stored} if stored.get("policy") == match[1] else {}
    budget: int | Literal["auto"] = "auto" if match[2] == "auto" else int(match[2])
    values = {"interval": default_interval(budget), **trained, **given, "policy": match[1], "budget": "auto"}
    if match[3]:
        values["interval"] = int(match[3])
        if not values["interval"]:
            fix = named.replace(f"+{match[3]}", f"+{default_interval(budget)}")
            raise UserError(f"--compare {named} has an interval of 0: it must be at least 1. Try --compare {fix}.")
    kv = KV(**values)
    if budget != "auto" and budget < kv.least_budget:
        fix = named.replace(f"@{match[2]}", "@{}")
        raise UserError(f"--compare {named} {kv.too_small(f'--compare {fix}')}")
    return Setting(KV(**values | {"budget": budget}))
