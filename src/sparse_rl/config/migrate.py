"""Read options of earlier versions: drop removed keys whose value changed nothing, convert renamed ones, refuse the rest."""

from typing import Any

from ..errors import UserError

REMOVED: dict[str, tuple[Any, str]] = {
    "rollout.top_p": (1.0, "the correction is exact only for the whole distribution: leave it out"),
    "rollout.top_k": (0, "the correction is exact only for the whole distribution: leave it out"),
    "rollout.approximate": (False, "it allowed rollout.top_p and top_k, which are gone: leave it out"),
    "log.project": ("sparse-rl", "set WANDB_PROJECT or TRACKIO_PROJECT in the environment"),
}
"""Removed options: (the value that may stay in a stored config.toml, the remedy for any other)."""
CHANGED = ("loss.smd.estimator", "loss.kl_estimator")


FREE_TABLES = ("kv.options", "data.chat_template_kwargs")
"""Options whose value is a table of the user's own keys."""


def migrated(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by dotted key without those that were removed."""
    kept: dict[str, Any] = {}
    for key, value in options.items():
        if key in REMOVED:
            neutral, remedy = REMOVED[key]
            if value != neutral:
                raise UserError(f"{key} = {value!r} is no longer an option: {remedy}.")
        elif key == "loss.smd.estimator":
            if value != "full":
                kept["loss.smd.top_k"] = _top_k(value)
        elif key == "loss.kl_estimator" and value == "k1":
            raise UserError("loss.kl_estimator = 'k1' is no longer an option: its gradient is zero on average. Use k2 or k3.")
        elif free := next((table for table in FREE_TABLES if key.startswith(f"{table}.")), None):
            kept.setdefault(free, {})[key.removeprefix(f"{free}.")] = value  # checkpoints held these one by one
        else:
            kept[key] = value
    return kept


def migrated_tables(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a TOML file, migrated like `migrated` does for dotted keys."""
    for key in (*REMOVED, *CHANGED):
        values = _migrated_in(values, key.split("."), key)
    return values


def _migrated_in(table: dict[str, Any], path: list[str], key: str) -> dict[str, Any]:
    """Return a copy of `table` in which the option at `path` is migrated."""
    name, *rest = path
    if name not in table or (rest and not isinstance(table[name], dict)):
        return table
    if rest:
        return table | {name: _migrated_in(table[name], rest, key)}
    others = {each: value for each, value in table.items() if each != name}
    return others | {new.rpartition(".")[2]: value for new, value in migrated({key: table[name]}).items()}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key. A free table is one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and prefix + key not in FREE_TABLES
        found |= flat(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def _top_k(estimator: Any) -> int:
    text = str(estimator).removeprefix("top-")
    if not text.isdigit():
        raise UserError(f"loss.smd.estimator = {estimator!r} is no longer an option: set loss.smd.top_k, such as 64.")
    return int(text)
