"""Load a model and its tokenizer from a hub id, a folder, a GGUF file or the embedded model `tiny`.

Weights are read only from safetensors, because a pickle may run code.
"""

import contextlib
import difflib
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, constants
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from ..errors import UNREACHABLE, MissingResource, UserError, first_line, notice
from ..hub import why_unreachable
from ..text import listed, printable, quoted
from . import gguf
from .folder import (
    check_model_folder,
    check_tokenizer_folder,
    needs_custom_code,
    needs_newer_transformers,
    refuse_missing,
    unknown_layer,
)
from .four_bit import quantize_layers
from .stored_kv import stored_base

DRIVER = Path("/proc/driver/nvidia/version")
TINY = Path(__file__).parent / "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    base: Literal["auto", "4bit"] = "auto",
) -> PreTrainedModel:
    """Load a causal language model from a hub id, a folder, a GGUF file or `tiny`.

    `dtype` defaults to bfloat16 on a GPU and float32 on a CPU. Only safetensors weights are read. With `base` 4bit, the linear
    layers are quantized on their way to the device. With auto, this is done for an adapter that was trained on 4-bit weights.
    """
    dtype, device = place(dtype, device)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is invalid: use one of {', '.join(DTYPES)}.")
    folder = str(gguf.model_folder(path)) if gguf.is_gguf(path) else resolve(path)
    check_model_folder(folder, trust_remote_code=trust_remote_code)
    try:
        with no_progress_bar() if folder == str(TINY) else contextlib.nullcontext(), _hub_asked_once(folder):
            expanded = _expansion(folder)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **expanded,
            )
        if expanded:
            model.to(DTYPES[dtype])  # transformers expands to bfloat16
            model._weight_conversions = None  # else it would save the weights under the names of their codes
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # values of config.json can cause errors anywhere in the model code
        raise _refusal("model", path, error) from error
    _refuse_incomplete(path, info)
    if base == "4bit" or (hasattr(model, "peft_config") and stored_base(folder) == "4bit"):
        quantize_layers(model)
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError:
        raise  # the device works, so the caller reports settings that would fit
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"Device {device!r} cannot be used ({first_line(error)}): choose another device, such as cpu."
        ) from error
    _refuse_broken(path, model)
    return model


def _expansion(folder: str) -> dict[str, Any]:
    """Return the options with which transformers expands MXFP4 weights, which it cannot train (gpt-oss)."""
    stored = _config(folder).get("quantization_config")
    is_mxfp4 = isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"
    return {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}


def _config(folder: str) -> dict[str, Any]:
    """Return the content of config.json; an empty dict for an adapter, or if it cannot be read."""
    try:
        return PreTrainedConfig.get_config_dict(folder)[0]
    except OSError:
        return {}


def _refuse_incomplete(path: str, info: dict[str, Any]) -> None:
    """Raise if weights are missing or have another shape. transformers would initialize them at random."""
    for key, what in (("missing_keys", "lack"), ("mismatched_keys", "have the wrong shape for")):
        names = [name if isinstance(name, str) else name[0] for name in info.get(key) or ()]
        if names:
            raise UserError(
                f"The weights of {quoted(path, 200)} {what} {listed(sorted(names), 3)}, which config.json requires: they are damaged "
                "or belong to another model. Copy or download the folder again."
            )


def _refuse_broken(path: str, model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise UserError(
                f"The weights of {quoted(path, 200)} are damaged: {name} contains values that are not finite. Copy or "
                "download them again, or use an earlier checkpoint."
            )


def place(dtype: str | None, device: str | None) -> tuple[str, str]:
    """Return (dtype, device), chosen for this machine if None. Print a notice if the GPU lacks bfloat16."""
    device = device or ("cuda" if _cuda_works() else "cpu")
    if dtype is None and device.startswith("cuda") and _cuda_works() and not _has_bfloat16():
        notice(
            f"{torch.cuda.get_device_name()} does not support bfloat16: the model runs in float32, which is slower and "
            "needs twice the memory."
        )
        dtype = "float32"
    return dtype or ("bfloat16" if device.startswith("cuda") else "float32"), device


def _has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


@cache
def _cuda_works() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notice below replaces torch's warning
        if torch.cuda.is_available():
            return True
    if DRIVER.exists():
        try:
            torch.cuda.init()
            reason = "no device is visible"
        except (RuntimeError, AssertionError) as error:
            reason = first_line(error)
        notice(
            f"An NVIDIA driver is installed, but torch {torch.__version__} cannot use the GPU ({reason}): running on the "
            "CPU. Install compatible versions of the driver and torch."
        )
    return False


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. `path` has the same forms as in `load_model`."""
    folder = str(gguf.tokenizer_folder(path)) if gguf.is_gguf(path) else resolve(path)
    check_tokenizer_folder(folder)
    try:
        with _hub_asked_once(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        words = len(tokenizer.get_vocab()) - len(set(tokenizer.all_special_tokens))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises its own errors
        raise _refusal("tokenizer of", path, error) from error
    if words < 1:  # transformers creates an empty tokenizer if it finds no files
        raise _no_tokenizer(path)
    return tokenizer


def _no_tokenizer(path: str) -> UserError:
    return UserError(
        f"The model {quoted(path, 200)} has no tokenizer files that transformers can read: copy tokenizer.json into its folder, or "
        "install sentencepiece if it has only tokenizer.model."
    )


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars inside the block, e.g. for fast loads or while another bar is shown."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def resolve(path: str) -> str:
    """Return the folder of `tiny`, unless a local folder has that name. Return any other path unchanged.

    A misspelt name raises and is not looked up on the hub.
    """
    if path == "tiny" and not Path("tiny").is_dir():
        return str(TINY)
    close = difflib.get_close_matches(path, ["tiny", *gguf.PACKAGED], n=1, cutoff=0.8)
    if close and not Path(path).is_dir():
        raise UserError(f"No model is named {path!r}: did you mean {close[0]}?")
    refuse_missing(path)
    return path


@contextlib.contextmanager
def _hub_asked_once(path: str) -> Iterator[None]:
    """Use the local copy if the hub does not answer, or raise. transformers would retry for most of a minute."""
    if Path(path).exists() or path.count("/") > 1:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set" if before else why_unreachable(HfApi().model_info, path)
    try:
        constants.HF_HUB_OFFLINE = why is not None
        yield
    except OSError as error:
        if why is None:
            raise
        raise MissingResource(
            f"{UNREACHABLE} for the model {path!r} ({why}), and the model is not in the local cache: check the network "
            "connection, or pass a folder."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _refusal(kind: str, path: str, error: Exception) -> UserError:
    """Return the error for a user. For a hub id, some reasons are known only from the message of transformers."""
    if "trust_remote_code" in str(error):
        return needs_custom_code(path)
    if "backend tokenizer" in str(error):
        return _no_tokenizer(path)
    if "validate_layer_type" in str(error) and (layer := unknown_layer(_config(path))):
        return needs_newer_transformers(path, layer)
    if found := re.search(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error)):
        return UserError(
            f"The model {path!r} has a {found[1]}, for which transformers has no causal language model: use its text model if it "
            "is published separately, or another model."
        )
    return UserError(
        f"The {kind} {path!r} could not be loaded ({printable(first_line(error), 200)}): pass a hub id, a folder with a "
        "Hugging Face model (safetensors), a GGUF file, or tiny."
    )
