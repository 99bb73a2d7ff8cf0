"""Read sparse_rl.json: the settings a model was trained with, stored next to its weights. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import FORMAT, refuse_total_budget
from ..config.kv import is_import_path
from ..errors import UserError
from ..hub import is_hub_id, why_unreachable
from ..text import quoted

FILE = "sparse_rl.json"


def stored_kv(path: str, chosen: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the `kv` options stored with a model in a folder or on the hub; an empty dict if there are none.

    `chosen` are the `kv` options that the user has set. A stored policy that would import a module raises UserError, unless
    the user has set a policy. A downloaded model therefore runs no code. A budget of an earlier version that counts a
    protected prompt raises UserError, unless the user has set a budget.
    """
    file = stored_file(path, FILE)
    if file is None:
        return {}
    try:
        whole = json.loads(file.read_text())
        stored = dict(whole["kv"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} has no valid KV settings ({error}): write it again with sparse-rl export.") from error
    policy = str(stored.get("policy", ""))
    if "policy" not in chosen and is_import_path(policy):
        raise UserError(
            f"{file} sets the policy {quoted(policy)}, which would import custom code. If you trust the code, pass the "
            "policy with --kv.policy."
        )
    options = {f"kv.{name}": value for name, value in {**stored, **chosen}.items()}
    options |= {key: value for key, value in whole.items() if key == "format"}
    if "budget" not in chosen:
        refuse_total_budget(options, f"set kv.budget to {{}}, or correct {file} and add format = {FORMAT}")
    return stored


def stored_base(path: str) -> str:
    """Return `4bit` for an adapter that was trained on base weights in 4 bits, else `auto`."""
    file = stored_file(path, FILE)
    try:
        return "auto" if file is None else str(json.loads(file.read_text()).get("base", "auto"))
    except (OSError, ValueError, AttributeError):
        return "auto"  # `stored_kv` reports the damage


def stored_file(path: str, name: str) -> Path | None:
    """Return a file that sparse-rl writes next to a model's weights, in a folder or on the hub; None if there is none."""
    file = Path(path) / name
    if file.is_file():
        return file
    return _from_hub(path, name) if is_hub_id(path) else None


def _from_hub(path: str, name: str) -> Path | None:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # otherwise the library would retry the hub for half a minute
        offline = why_unreachable(HfApi().model_info, path) is not None
        return Path(hf_hub_download(path, name, local_files_only=offline))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
        return None  # the model was not trained with sparse-rl, or the hub is unreachable
