"""Read the index of a checkpoint (`.metadata` of torch.distributed.checkpoint) without executing code from the file.

torch stores the index as a pickle. This module unpickles every known class as an inert record, then rebuilds the index from
the records and validates each value. A pickle that contains any other name raises ValueError.
"""

import io
import pickle
import re
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

FILE = ".metadata"
PART = re.compile(r"__\d+_\d+\.distcp")
"""Name of a tensor file that one rank wrote, such as `__0_0.distcp`."""
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # since Python 3.13
}


def read_index(content: bytes) -> Metadata:
    """Return the index stored in `content`. Raise ValueError if `content` is not a valid index."""
    try:
        return _index(_Unpickler(io.BytesIO(content)).load())
    except MemoryError as error:
        raise ValueError("it needs more memory than is available") from error
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle may raise any type
        raise ValueError(f"it is not a checkpoint index: {type(error).__name__}") from error


class _Record:
    """Inert replacement for an object in the pickle. It only stores the constructor arguments and the state."""

    def __init__(self, *args: Any):
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that creates new record classes for each pickle, so that a pickle cannot modify shared objects."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in RECORDS.get(module, ()):
            raise ValueError(f"it refers to {module}.{name}"[:80] + ", which does not belong in a checkpoint")
        return self.classes.setdefault(name, type(name, (_Record,), {}))


def _index(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    tensors: dict[str, STORAGE_TYPES] = {_text(name): _tensor(each) for name, each in fields["state_dict_metadata"].items()}
    places = {_key(key): _place(each) for key, each in fields["storage_data"].items()}
    return Metadata(tensors, None, places, StorageMeta(), "1.0.0")


def _tensor(record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    dtype = _made(fields["properties"], "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    parts = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(dtype), _size(fields["size"]), parts)


def _key(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _place(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    path = _text(fields["relative_path"])
    if not PART.fullmatch(path) or fields.get("transform_descriptors"):
        raise ValueError(f"it points to {path!r:.80}")
    return _StorageInfo(path, _count(fields["offset"]), _count(fields["length"]))


def _made(record: Any, name: str) -> _Record:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it has {type(record).__name__} instead of {name}")
    return record


def _fields(record: Any, name: str) -> dict[str, Any]:
    state = _made(record, name).state
    if not isinstance(state, dict):
        raise ValueError(f"its {name} has no fields")
    return state


def _size(record: Any) -> torch.Size:
    (values,) = _made(record, "Size").args
    return torch.Size([_count(value) for value in values])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"it has {value!r:.40} instead of a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it has names that are not text")
    return value
