"""Get a model and its tokenizer: by hub id, from a folder, or `tiny`, the one that ships inside the package."""

import contextlib
import difflib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from ..errors import UserError, first_line, notice

DRIVER = Path("/proc/driver/nvidia/version")
TINY = Path(__file__).parent / "tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str, *, dtype: str | None = None, device: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model, ready to sample. `dtype` is bfloat16 on a GPU and float32 on a CPU unless named."""
    dtype, device = place(dtype, device)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: it is one of {', '.join(DTYPES)}.")
    folder = resolve(path)
    try:
        with no_bar() if folder == str(TINY) else contextlib.nullcontext():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(_sentence("model", path, error)) from error
    try:
        return model.to(device).eval()
    except torch.OutOfMemoryError:
        raise  # the device works: whoever asked knows what would fit
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"Device {device!r} cannot be used ({first_line(error)}): name another, such as cpu.") from error


def place(dtype: str | None, device: str | None) -> tuple[str, str]:
    """(dtype, device), chosen for this machine where not named. Says in one line where a GPU cannot do what it should."""
    device = device or ("cuda" if _cuda_works() else "cpu")
    if dtype is None and device.startswith("cuda") and _cuda_works() and not _has_bfloat16():
        notice(f"{torch.cuda.get_device_name()} has no bfloat16: the model runs in float32, twice as large and slower.")
        dtype = "float32"
    return dtype or ("bfloat16" if device.startswith("cuda") else "float32"), device


def _has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


@cache
def _cuda_works() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of is said below
        if torch.cuda.is_available():
            return True
    if DRIVER.exists():
        try:
            torch.cuda.init()
            reason = "no device is visible"
        except (RuntimeError, AssertionError) as error:
            reason = first_line(error)
        notice(
            f"There is an NVIDIA driver, but torch {torch.__version__} cannot use its GPU ({reason}): running on the CPU. "
            "Install a driver and a torch that fit each other."
        )
    return False


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(_sentence("tokenizer of", path, error)) from error


@contextlib.contextmanager
def no_bar() -> Iterator[None]:
    """For what takes no time, such as the embedded model, and where another progress is shown: transformers shows no bars."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def resolve(path: str) -> str:
    """`tiny` is the embedded model, unless a folder of that name lies here; a misspelt one is not looked for on the hub."""
    if path == "tiny" and not Path("tiny").is_dir():
        return str(TINY)
    if difflib.get_close_matches(path, ["tiny"], cutoff=0.8) and not Path(path).is_dir():
        raise UserError(f"There is no model {path!r}: did you mean tiny?")
    return path


def _sentence(kind: str, path: str, error: Exception) -> str:
    return f"The {kind} {path!r} could not be loaded ({first_line(error)}): give a hub id, a folder with a Hugging Face model, or tiny."
