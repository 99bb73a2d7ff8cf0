"""Reach the hub: check once, with a short timeout, whether it answers, and upload a model folder.

The hub libraries retry for most of a minute.
"""

from collections.abc import Callable
from pathlib import Path

from .errors import UNREACHABLE, MissingResource, UserError, first_line
from .text import printable, quoted

PROBE_S = 10.0
"""Timeout of the check in seconds."""

REPLACED = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_model.safetensors", "adapter_config.json", "sparse_rl.json", "sparse_rl.statistics",
)  # fmt: skip
"""Files of a model that an upload deletes unless it replaces them. A model left next to an adapter would be loaded first."""


def why_unreachable(ask: Callable[..., object], id: str) -> str | None:
    """Return why the hub cannot be reached, or None if it sends any response. `ask` is `HfApi().model_info` or
    `dataset_info`."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        ask(id, timeout=PROBE_S)
    except HfHubHTTPError:
        return None
    except Exception as error:  # the HTTP library's exception type is an implementation detail
        return first_line(error)
    return None


def is_hub_id(path: str) -> bool:
    """Return whether the path is a hub id, and neither a folder nor a misspelt path inside an existing folder."""
    return path.count("/") == 1 and not Path(path).exists() and not Path(path).parent.is_dir()


def check_push(repo: str) -> None:
    """Raise UserError if a push to `repo` must fail: the id is malformed, there is no valid token, or the hub does not answer."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"{quoted(repo)} is not a repository id: write owner/name with letters, digits, '-', '_' and '.', such as "
            "me/my-model."
        ) from error
    if get_token() is None:
        raise UserError(f"A push to {repo} needs a token of the hub: log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    if why := why_unreachable(api.model_info, repo):
        raise MissingResource(
            f"{UNREACHABLE} for a push to {repo} ({printable(why, 200)}): check the network connection, or export to a folder "
            "without --push."
        )
    try:
        api.whoami()
    except HfHubHTTPError as error:
        raise _refusal(repo, error) from error


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a model folder to `repo` in one commit and return its address. A new repository is created.

    Files of an earlier model in the repository are replaced, all others stay.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(created.repo_id).private:
            raise UserError(
                f"{created.repo_id} exists and is public, so --private has no effect: pass another repository, or make it "
                "private in its settings on the hub."
            )
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message, delete_patterns=list(REPLACED))
    except UserError:
        raise
    except Exception as error:  # HTTP errors, and those of the upload's threads
        raise _refusal(repo, error) from error
    return str(created)


def _refusal(repo: str, error: Exception) -> UserError:
    """Return the sentence for a response of the hub that ends a push."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return UserError(
            f"The hub does not accept the token for a push to {repo}: log in again with `hf auth login`, or set HF_TOKEN."
        )
    if status == 403:
        return UserError(
            f"The token has no right to write to {repo}: use a token with write access, or a repository of your own."
        )
    return UserError(f"The push to {repo} failed ({printable(first_line(error), 200)}): try again, or export to a folder.")
