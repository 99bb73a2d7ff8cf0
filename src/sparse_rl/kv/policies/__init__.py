"""Eviction policies, one per file. `get` returns one by name, entry point or dotted path."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import signature

from ...config import KV
from ...config.kv import is_import_path
from ...errors import UserError
from .base import Policy
from .expected import ExpectedAttention
from .full import Full
from .keydiff import KeyDiff
from .knorm import KNorm
from .random import Random
from .rkv import RKV
from .snapkv import SnapKV
from .streaming import Streaming
from .tova import TOVA
from .triattention import TriAttention

__all__ = ["ENTRY_POINT_GROUP", "POLICIES", "Policy", "find", "from_settings", "get"]

ENTRY_POINT_GROUP = "sparse_rl.policies"

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "rkv": RKV,
    "snapkv": SnapKV,
    "streaming": Streaming,
    "tova": TOVA,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "triattention": TriAttention,
    "expected": ExpectedAttention,
    "random": Random,
}


def from_settings(kv: KV) -> Policy:
    """Return the policy named in the `kv` section, with its window, sinks and options."""
    for name in ("window", "sinks"):
        if name in kv.options:
            raise UserError(
                f"kv.options must not contain {name}, which is a separate option: set kv.{name} = {kv.options[name]}."
            )
    forced = {} if kv.policy == "full" else {"window": kv.recent, "sinks": kv.sinks}
    policy = get(kv.policy, **forced, **kv.options)
    if kv.has_custom_policy and not policy.evicts:  # tables and plans take its budget for a limit
        raise UserError(f"Policy {kv.policy} never evicts (evicts = False), so kv.budget has no effect: set kv.policy = full.")
    if kv.protect_prompt and "protected" not in signature(policy.select).parameters:
        raise UserError(
            f"Policy {kv.policy} does not support kv.protect_prompt: add the argument `protected` to its select(), or set "
            "kv.protect_prompt = false."
        )
    if kv.quantised and policy.full_precision:
        raise UserError(f"Policy {kv.policy} needs keys in the model's dtype, but kv.dtype = {kv.dtype}: set kv.dtype = auto.")
    return policy


def get(name: str, **options) -> Policy:
    """Return a policy with its options: `get("rkv", window=8, sinks=4, mix=0.1)`.

    `name` is a built-in policy, a policy that a package registers in the entry point group `sparse_rl.policies`, or the dotted
    path of a class, e.g. `my_package.my_module:MyPolicy`.
    """
    make = find(name)
    if isinstance(make, type) and not issubclass(make, Policy):
        raise UserError(f"{name} is not a policy: derive it from sparse_rl.kv.policies.Policy.")
    if is_dataclass(make):
        known = [field.name for field in fields(make)]
        for option in options:
            if option not in known:
                raise UserError(f"Policy {name} has no option {option!r}{_nearest(option, known)}; it has {', '.join(known)}.")
    try:
        policy = make(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"Policy {name} rejected its options: {error}") from error
    if not isinstance(policy, Policy):
        raise UserError(
            f"{name} returns a {type(policy).__name__}, which is not a policy: derive it from sparse_rl.kv.policies.Policy."
        )
    return policy


def find(name: str) -> Callable[..., Policy]:
    if name in POLICIES:
        return POLICIES[name]
    refuse_unknown(name)
    registered = _registered()
    return registered[name].load() if name in registered else _load_dotted(name)


def refuse_unknown(name: str) -> None:
    """Raise UserError if this is neither the name of a policy nor an import path."""
    known = [*POLICIES, *_registered()]
    if name not in known and not is_import_path(name):
        raise UserError(
            f"Unknown KV policy {name!r}{_nearest(name, known)}: use one of {', '.join(known)}, or package.module:ClassName of "
            "your own class."
        )


def _registered() -> dict[str, EntryPoint]:
    """Return the policies that installed packages register."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load_dotted(path: str) -> Callable[..., Policy]:
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        absent = isinstance(error, ModuleNotFoundError)
        fix = "install the package, or set PYTHONPATH to its folder" if absent else "write it as package.module:ClassName"
        raise UserError(f"KV policy {path!r} could not be imported ({error}): {fix}.") from error


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
