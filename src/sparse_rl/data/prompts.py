"""Convert a problem to the token ids of its prompt. Chat templates are applied only here.

A chat template is code written by the model's author. It runs in Jinja's sandbox with a time limit of a few seconds.
"""

import ctypes
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..config import PLACEHOLDER, DataConfig
from ..errors import UserError, first_line, notice
from ..text import printable
from .examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0
"""Time limit for rendering one prompt, in seconds. A typical template takes less than a millisecond."""
CHAT_NAMES = re.compile(r"instruct|chat|assistant|-it\b", re.IGNORECASE)
CHAT_TOKENS = {"<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|assistant|>", "<|user|>"}
"""Special tokens of chat models. `CHAT_NAMES` matches the names of such models."""


def encoded(tokenizer: "PreTrainedTokenizerBase", examples: Sequence[Example], data: DataConfig) -> list[list[int]]:
    """Return the token ids of each prompt. Training, evaluation and the dry run all use this function."""
    options = (data.template, data.raw, data.chat_template_kwargs)
    prompts = [encode(tokenizer, example, *options) for example in examples]
    if len({str(example.prompt) for example in examples}) > 1 and len(set(map(tuple, prompts))) == 1:
        raise UserError(
            "The model's chat template renders every problem to the same prompt, so it ignores the message. Fix the "
            "template, or set --data.raw true."
        )
    return prompts


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    example: Example,
    template: str | None = None,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt, rendered with the tokenizer's chat template if it has one. A string becomes a user
    message.

    `template`, by default the example's, is applied to the string or to the content of the last message.
    `chat_template_kwargs`, e.g. Qwen3's enable_thinking, is passed to the chat template.
    """
    template = template or example.template
    chat = bool(tokenizer.chat_template) and not raw
    if isinstance(example.prompt, str):
        text = template.replace(PLACEHOLDER, example.prompt)
        if not chat:
            if not raw:
                _warn_of_missing_template(tokenizer)
            # prompts that are too long raise an error later, with a fix
            return _not_empty(list(tokenizer(text, verbose=False).input_ids))
        messages = [{"role": "user", "content": text}]
    elif chat:
        *before, last = example.prompt
        messages = [*before, last | {"content": template.replace(PLACEHOLDER, last["content"])}]
    else:
        why, fix = "the tokenizer has no chat template", "add chat_template.jinja to the model's folder"
        if raw:
            why, fix = "data.raw is set", "unset it"
        raise UserError(f"A prompt is a list of messages, but {why}: {fix}, or write prompts as text.")
    return _not_empty(_rendered(tokenizer, messages, chat_template_kwargs or {}))


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], options: Mapping[str, Any]) -> list[int]:
    """Return the token ids of messages in the chat template; empty if they are only whitespace."""
    try:
        with _time_limit(LIMIT_S):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )["input_ids"]
    except _TooLong:
        raise UserError(
            f"The model's chat template took more than {LIMIT_S:g} s for one prompt: fix the template, or write prompts as "
            "text and set --data.raw true."
        ) from None
    except Exception as error:  # a template can raise any exception
        raise UserError(
            f"The model's chat template raised an error for a prompt ({printable(first_line(error), 200)}): change its "
            "messages, or write prompts as text and set --data.raw true."
        ) from error
    return list(ids) if tokenizer.decode(ids).strip() else []


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise UserError(
            "A prompt has no tokens after encoding: the tokenizer or its chat template drops all text. Use another model."
        )
    return ids


def _warn_of_missing_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    name = str(tokenizer.name_or_path).rstrip("/").rpartition("/")[2]
    if CHAT_NAMES.search(name) or CHAT_TOKENS & set(tokenizer.all_special_tokens):
        notice(
            f"{name} looks like a chat model, but its tokenizer has no chat template: prompts are used verbatim. Add "
            "chat_template.jinja to its folder, or set --data.raw true if this is intended."
        )


class _TooLong(BaseException):
    """Raised in a template that exceeds the time limit. It derives from BaseException so that the interrupted code does not
    catch it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in this thread when the time is over. The exception interrupts only Python code."""
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        timer.cancel()
