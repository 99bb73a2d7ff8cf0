"""Migrate options of earlier versions: drop removed options that had no effect, convert renamed ones, and raise for all
others."""

from typing import Any

from ..errors import UserError

REMOVED: dict[str, tuple[Any, str]] = {
    "rollout.top_p": (1.0, "remove it; the correction is exact only without truncated sampling"),
    "rollout.top_k": (0, "remove it; the correction is exact only without truncated sampling"),
    "rollout.approximate": (False, "remove it; rollout.top_p and rollout.top_k no longer exist"),
    "log.project": ("sparse-rl", "set WANDB_PROJECT or TRACKIO_PROJECT in the environment"),
}
"""Removed options: (value that is accepted in a stored config.toml, fix for any other value)."""
CHANGED = ("loss.smd.estimator", "loss.kl_estimator")


FORMAT = 2
"""Value of `format` in files that sparse-rl writes. Before format 2, `kv.budget` also counted a protected prompt."""
ALWAYS_WRITTEN = ("kv.policy", "kv.budget", "kv.interval", "kv.window", "kv.sinks", "kv.protect_prompt")
"""Options that files written by sparse-rl have always held. Files written by hand rarely set them all."""

USUAL_LEAST = 64
"""A smaller budget than this is hardly meant: the prompt took the old one."""
FREE_TABLES = ("kv.options", "data.chat_template_kwargs")
"""Options whose value is a table with user-defined keys."""


def migrated(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options by dotted key, with removed options dropped and renamed options converted."""
    kept: dict[str, Any] = {}
    for key, value in options.items():
        if key in REMOVED:
            neutral, remedy = REMOVED[key]
            if value != neutral:
                raise UserError(f"{key} = {value!r} is no longer supported: {remedy}.")
        elif key == "loss.smd.estimator":
            if value != "full":
                kept["loss.smd.top_k"] = _top_k(value)
        elif key == "loss.kl_estimator" and value == "k1":
            raise UserError("loss.kl_estimator = 'k1' is no longer supported: its gradient is zero on average. Use k2 or k3.")
        elif free := next((table for table in FREE_TABLES if key.startswith(f"{table}.")), None):
            kept.setdefault(free, {})[key.removeprefix(f"{free}.")] = value  # old checkpoints stored these keys separately
        else:
            kept[key] = value
    return kept


def migrated_tables(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a TOML file, migrated in the same way as `migrated` and without `format`."""
    written = {key: value for key, value in values.items() if key == "format"}
    for section in ("kv", "data", "rollout"):
        table = values.get(section)
        written |= {f"{section}.{key}": value for key, value in table.items()} if isinstance(table, dict) else {}
    refuse_total_budget(written, f"set it to {{}}, and add the line format = {FORMAT} at the top of the file")
    for key in (*REMOVED, *CHANGED):
        values = _migrated_in(values, key.split("."), key)
    return {key: value for key, value in values.items() if key != "format"}


def refuse_total_budget(options: dict[str, Any], remedy: str) -> None:
    """Raise if sparse-rl wrote these options, by dotted key, when `kv.budget` counted a protected prompt.

    `remedy` may contain `{}`, which is replaced by the budget that counts response tokens.
    """
    written = options.get("format")
    if (isinstance(written, int) and written >= FORMAT) or not options.keys() >= set(ALWAYS_WRITTEN):
        return
    if options["kv.protect_prompt"] is not True or options["kv.policy"] == "full":
        return
    raise UserError(
        f"kv.budget = {options['kv.budget']} was written by an earlier version and counts the prompt. With kv.protect_prompt it "
        f"now counts response tokens: {remedy.format(_response_budget(options))}."
    )


def _response_budget(options: dict[str, Any]) -> str:
    """Return the budget in response tokens that replaces a total one, for a message."""
    budget, prompt, longest = (options.get(key) for key in ("kv.budget", "data.max_prompt_tokens", "rollout.max_tokens"))
    forced = sum(size for key in ("kv.window", "kv.sinks") if isinstance(size := options[key], int))
    least = max(USUAL_LEAST, forced + 1)
    if not isinstance(prompt, int) or not isinstance(budget, int):
        return f"{budget} less the tokens of the longest prompt, but at least {least}"
    if least <= budget - prompt and not (isinstance(longest, int) and longest <= budget - prompt):
        return f"{budget - prompt}, which is {budget} less data.max_prompt_tokens"
    if isinstance(longest, int) and longest // 2 >= least:
        return f"{longest // 2}, which is half of rollout.max_tokens"
    return f"the response tokens to keep, at least {least}"


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
    """Return the values of nested tables by dotted key. A table with user-defined keys is one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and prefix + key not in FREE_TABLES
        found |= flat(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def _top_k(estimator: Any) -> int:
    text = str(estimator).removeprefix("top-")
    if not text.isdigit():
        raise UserError(f"loss.smd.estimator = {estimator!r} is no longer supported: set loss.smd.top_k, such as 64.")
    return int(text)
