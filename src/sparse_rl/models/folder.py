"""Validate a model folder before loading it. Missing or damaged files, and files that would run code, raise an error.

Reads small JSON files and safetensors headers. Imports no torch.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UserError, first_line
from ..reading import read_file
from ..text import quoted

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MOST_BYTES = 2**26
"""Maximum size of a JSON file. Tokenizers with large vocabularies have 2**25 bytes."""
MOST = {"num_hidden_layers": 2**12, "vocab_size": 2**24, "hidden_size": 2**17, "intermediate_size": 2**20,
        "num_attention_heads": 2**12, "num_key_value_heads": 2**12, "head_dim": 2**14, "max_position_embeddings": 2**31,
        "num_experts": 2**14, "num_local_experts": 2**14}  # fmt: skip
"""Maximum values in config.json. They exceed those of every existing model."""
WHOLE_NUMBERS = {"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}
OLD_LAYER_TYPES = ("attention", "mamba", "mlp")
"""Layer types that transformers accepts in some families but does not list in ALLOWED_LAYER_TYPES."""
CONFIG, ADAPTER = "config.json", "adapter_config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def context_length(positions: int | None, rope: dict[str, Any] | None, original: int | None = None) -> int | None:
    """Return the context length that a config states. YaRN multiplies the length of the original training. longrope changes its
    frequencies beyond that length, so the context ends there. `original` is that length if `rope` does not state it."""
    by_layer_type = [each for each in (rope or {}).values() if isinstance(each, dict)]
    if by_layer_type:
        lengths = [context_length(positions, each, original) for each in by_layer_type]
        other = [length for length in lengths if length is not None and length != positions]
        return min(other, default=positions)  # layers without scaling have short windows
    rope = rope or {}
    original = rope.get("original_max_position_embeddings") or original or positions
    kind = rope.get("rope_type") or rope.get("type")  # older files say type
    if kind == "longrope":
        return original
    if positions is None or kind != "yarn" or not rope.get("factor"):
        return positions
    return max(positions, int(rope["factor"] * (original or positions)))


def changes_with_length(rope: dict[str, Any] | None) -> bool:
    """Return whether the frequencies of rotary embeddings change beyond the context length, so that cached keys no longer fit."""
    of_all = (rope or {}, *(each for each in (rope or {}).values() if isinstance(each, dict)))
    return any((each.get("rope_type") or each.get("type")) in ("dynamic", "longrope") for each in of_all)


def refuse_missing(path: str) -> None:
    """Raise if a path does not exist locally and cannot be a hub id."""
    here = Path(path)
    if "\0" in path or not path.strip():
        raise UserError(f"model.path = {quoted(path)} is not a model: pass a hub id, a folder, a GGUF file, or tiny.")
    if here.exists():
        if here.is_file() and here.suffix != ".gguf":
            raise UserError(
                f"The model {quoted(path)} is a file: pass the folder that contains its config.json, or a GGUF file."
            )
        return
    is_path = path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1 or "\\" in path
    if is_path or ("/" in path and here.parent.is_dir()) or path.endswith(".gguf"):
        kind = "file" if path.endswith(".gguf") else "folder"
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise UserError(f"There is no model {kind} {quoted(path, 200)}{where}: pass a folder, a GGUF file, a hub id, or tiny.")


def check_model_folder(path: str, *, trust_remote_code: bool = False) -> None:
    """Raise if the folder does not hold a complete model. Do nothing for a hub id."""
    folder = Path(path)
    if not folder.is_dir():
        return
    _check_whole(folder, trust_remote_code)
    if (folder / ADAPTER).exists():
        _check_base(folder, trust_remote_code)


def _check_base(folder: Path, trust_remote_code: bool) -> None:
    """Check the base model of an adapter, which transformers loads first. Do nothing for a hub id."""
    if (folder / "adapter_model.bin").exists():
        raise UserError(
            f"{folder / 'adapter_model.bin'} is a pickle file, which can run arbitrary code: save the adapter as safetensors."
        )
    base = _json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str):
        _refuse(folder / ADAPTER, f"base_model_name_or_path = {quoted(base)} is not a model")
    try:
        refuse_missing(base)
        if Path(base).is_dir():
            if not (Path(base) / CONFIG).exists() and (Path(base) / ADAPTER).exists():
                raise UserError(f"{base} is itself an adapter. Merge it into its base model first.")
            _check_whole(Path(base), trust_remote_code)
    except UserError as error:
        raise UserError(f"The base model of the adapter {folder} cannot be used: {error}") from error


def _check_whole(folder: Path, trust_remote_code: bool) -> None:
    config = checked_config(folder)
    _refuse_unknown(folder, config, trust_remote_code)
    for name in ("generation_config.json", ADAPTER):
        if (folder / name).exists() or (folder / name).is_symlink():
            _json(folder / name)
    for file in _weights(folder):
        for name, dtype in _dtypes(file).items():
            if dtype in WHOLE_NUMBERS and name.endswith("weight") and "quantization_config" not in config:
                _refuse(file, f"{quoted(name)} has an integer dtype ({dtype})")


def check_tokenizer_folder(path: str) -> None:
    """Raise if a JSON file of the tokenizer is damaged. Do nothing for a hub id."""
    folder = Path(path)
    for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
        if folder.is_dir() and ((folder / name).exists() or (folder / name).is_symlink()):
            _json(folder / name)


def checked_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json after validation; an empty dict for an adapter."""
    config = _config(folder)
    _refuse_code(folder, config)
    _check_sizes(folder, config)
    return config


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file() and (folder / ADAPTER).is_file():
        return {}
    if not file.exists() and not file.is_symlink():
        raise UserError(f"{folder} is not a model folder (no config.json): pass a folder that contains config.json.")
    return _json(file)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(str(file), MOST_BYTES).decode())
    except OSError as error:
        _refuse(file, f"it cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        _refuse(file, f"it is not JSON ({first_line(error)})")
    if not isinstance(found, dict):
        _refuse(file, "it is not a JSON object")
    return found


def _refuse(file: Path, why: str) -> NoReturn:
    raise UserError(f"{file} is damaged: {why}. Copy or download it again.")


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise if the attention implementation is the name of a repository, because transformers would download and run it."""
    for key, value in _entries(config):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise UserError(
                f"{folder / CONFIG} refers to code in {quoted(value)} ({key}), which sparse-rl does not run: remove this "
                "entry."
            )


def _refuse_unknown(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    from transformers import CONFIG_MAPPING, __version__

    kind, own_code = config.get("model_type"), "auto_map" in config
    if kind is None or (isinstance(kind, str) and kind in CONFIG_MAPPING) or (own_code and trust_remote_code):
        return
    if own_code:
        raise needs_custom_code(str(folder))
    raise UserError(
        f"{folder / CONFIG} has model_type = {quoted(kind)}, which transformers {__version__} does not support: use "
        "another model, or a newer version of transformers."
    )


def unknown_layer(config: dict[str, Any]) -> str | None:
    """Return the first layer of a type that the installed transformers does not know, in words; None if it knows all."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    for table in (config, config.get("text_config")):
        types = table.get("layer_types") or table.get("layers_block_type") if isinstance(table, dict) else None
        for layer, name in enumerate(types if isinstance(types, list) else ()):
            if name not in (*ALLOWED_LAYER_TYPES, *OLD_LAYER_TYPES):
                return f"layer {layer} of type {quoted(name)}"
    return None


def needs_newer_transformers(name: str, layer: str) -> UserError:
    from transformers import __version__

    return UserError(
        f"The model {name} has {layer}, which transformers {__version__} does not support: use another model, or a newer version "
        "of transformers."
    )


def needs_custom_code(name: str) -> UserError:
    return UserError(
        f"The model {name} needs custom code, which is not run by default: set trust_remote_code if you trust the model, or use "
        "another model."
    )


def _entries(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)


def _check_sizes(folder: Path, config: dict[str, Any]) -> None:
    for key, value in _entries(config):
        if key in MOST and value is not None and (type(value) is not int or not 1 <= value <= MOST[key]):
            raise UserError(
                f"{folder / CONFIG} has {key} = {quoted(value)}, out of range: it must be a whole number from 1 to "
                f"{MOST[key]:,}. Copy or download the file again."
            )


def _weights(folder: Path) -> list[Path]:
    """Return the weight files. Raise unless all exist and are safetensors files."""
    index = folder / INDEX
    if index.exists() or index.is_symlink():
        return _shards(index)
    files = [folder / name for name in (WEIGHTS, "adapter_model.safetensors") if (folder / name).exists()]
    if files or (folder / WEIGHTS).is_symlink():
        return files or [folder / WEIGHTS]
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"The model {str(folder)!r} has only pickled weights ({pickled[0]}), which can run arbitrary code: save it as "
            "safetensors with model.save_pretrained(folder)."
        )
    raise UserError(f"The folder {folder} has no weights (neither {WEIGHTS} nor {INDEX}): copy or download it again.")


def _shards(index: Path) -> list[Path]:
    table = _json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        _refuse(index, "its weight_map does not map every weight to a file")
    files = []
    for name in sorted(set(table.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index} names {quoted(name)}, which is not a safetensors file in the same folder: pickle files and other "
                "folders are not read. Save the model as safetensors."
            )
        if not (index.parent / name).is_file():
            _refuse(index, f"it lists {quoted(name)}, which does not exist")
        files.append(index.parent / name)
    held = {name: {key for key, file in table.items() if file == name} for name in set(table.values())}
    for file in files:
        if missing := held[file.name] - set(_dtypes(file)):
            _refuse(index, f"{quoted(file.name)} lacks {quoted(min(missing))}")
    return files


def _dtypes(file: Path) -> dict[str, str]:
    """Return the dtype of each weight. safetensors checks that the header matches the file size exactly."""
    from safetensors import safe_open

    try:
        if not file.is_file():
            _refuse(file, "it is not a file")
        with safe_open(file, framework="numpy") as opened:
            return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except UserError:
        raise
    except Exception as error:  # safetensors raises its own errors
        _refuse(file, f"it is an incomplete or damaged safetensors file ({first_line(error)})")
