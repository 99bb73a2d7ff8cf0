"""Read the rows of a data set on the Hugging Face hub with `datasets`, which caches the data on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import HubData
from ..errors import UNREACHABLE, MissingResource, UserError, first_line, notice
from ..hub import why_unreachable
from .rows import DataRow


def read_hub(data: HubData, instead: str) -> list[DataRow]:
    """Return all rows of a split. `instead` is the fix that the error states if the hub cannot be reached."""
    import datasets  # imported here because the import takes a second
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    place = " ".join(part for part in (data.id, data.config, data.file, data.split) if part)
    if (unreachable := why_unreachable(HfApi().dataset_info, data.id)) is None:
        notice(f"loading {place} from the hub")
    options: dict[str, Any] = {"data_files": {data.split: data.file}} if data.file else {}
    try:
        with _quiet(), _offline(unreachable is not None):
            table = datasets.load_dataset(data.id, data.config, split=data.split, **options)
    except (RepositoryNotFoundError, GatedRepoError, datasets.exceptions.DatasetNotFoundError) as error:
        if unreachable:
            raise _cannot_reach(data.id, unreachable, instead) from error
        raise UserError(
            f"Hub dataset {data.id} does not exist or is private: check its name, or log in with `hf auth login`."
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise _cannot_reach(data.id, unreachable or first_line(error), instead) from error
    except Exception as error:  # unknown configuration or split, data without a table, full disk
        if unreachable:
            raise _cannot_reach(data.id, unreachable, instead) from error
        raise UserError(
            f"{place} cannot be loaded from the hub ({first_line(error)}): choose another configuration or split as "
            f"{data.id}:configuration:split, or {instead}."
        ) from error
    return [DataRow(f"{place}, row {number}", values) for number, values in enumerate(table, 1)]


def _cannot_reach(id: str, why: str, instead: str) -> MissingResource:
    return MissingResource(f"{UNREACHABLE} for {id} ({why}): check the network connection, or {instead}.")


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """With `offline`, read only the cached copy. `datasets` would otherwise try the network for half a minute."""
    import datasets.config
    import huggingface_hub.constants

    places = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value or offline
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets`, which would interfere with ours."""
    import datasets

    before = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.enable_progress_bars()
