"""Check that a supported version of TRL is installed. Imports neither TRL nor torch."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from ..errors import MissingResource, UserError

VERSIONS = ("1.15", "1.17")
"""First supported version of TRL, and the first version that is not."""


def require_trl(what: str) -> str:
    """Return the version of TRL. Raise if TRL is missing or another version; `what` needs it."""
    try:
        installed = version("trl")
    except PackageNotFoundError as error:
        raise MissingResource(f"{what} needs TRL: pip install 'sparse-rl[trl]'.") from error
    refuse_version(installed)
    return installed


def refuse_version(installed: str) -> None:
    first, end = VERSIONS
    if not Version(first) <= Version(installed) < Version(end):
        raise UserError(
            f"TRL {installed} is not supported, because its trainer differs inside: install one from {first} to below {end}, as in "
            f"pip install 'sparse-rl[trl]'."
        )
