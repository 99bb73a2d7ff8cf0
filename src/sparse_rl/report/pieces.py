"""Look up the text of each token id. `Tokenizer.decode` is unsuitable: it trims spaces and maps partial characters to `�`."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Piece = str | list[int]
"""The text of a token, or its bytes if they are not valid UTF-8 on their own."""

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """Maps token ids to texts for one `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        decoder = tokenizer.decoder
        try:
            state = decoder.__getstate__() if decoder is not None else b""  # JSON of the decoder, without the vocabulary
        except Exception:  # tokenizers raises a bare Exception for a decoder written in Python
            state = b""
        self.byte_level = b"ByteLevel" in state
        self.metaspace = b"Metaspace" in state or "\u2581".encode() in state or b"\\u2581" in state
        self._known: dict[int, Piece] = {}

    def of(self, ids: Iterable[int]) -> list[Piece]:
        return [self._known[token] if token in self._known else self._learn(token) for token in ids]

    def _learn(self, token: int) -> Piece:
        text = self.tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        self._known[token] = piece = f"⟨{token}⟩" if text is None else self._piece(text)
        return piece

    def _piece(self, text: str) -> Piece:
        if byte := BYTE.fullmatch(text):
            return _readable(bytes([int(byte[1], 16)]))
        if self.byte_level:
            codes = [byte_alphabet().get(character) for character in text]
            if None not in codes:
                return _readable(bytes(code for code in codes if code is not None))
        return text.replace("\u2581", " ") if self.metaspace else text


def _readable(data: bytes) -> Piece:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte alphabet of GPT-2, which maps every byte to a visible character."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(code): code for code in seen}
    hidden = [code for code in range(256) if code not in seen]
    return alphabet | {chr(256 + place): code for place, code in enumerate(hidden)}


def find(run: Path, model: str | None) -> Pieces | None:
    """Return the token texts from the run's model folder, or from the base model on disk. None if neither is found.

    Nothing is downloaded.
    """
    for file in _candidates(run, model):
        try:
            from tokenizers import Tokenizer

            return Pieces(Tokenizer.from_file(str(file)))
        except Exception:  # tokenizers raises bare Exceptions; try the next file
            continue
    return None


def _candidates(run: Path, model: str | None) -> list[Path]:
    files = [run / "model" / "tokenizer.json"]
    if model == "tiny":
        files.append(Path(__file__).parents[1] / "models" / "tiny" / "tokenizer.json")
    elif model:
        files.append(Path(model) / "tokenizer.json")
        files += _on_disk_from_hub(model)
    return [file for file in files if file.is_file()]


def _on_disk_from_hub(model: str) -> list[Path]:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # `model` is a path, not a hub id
        return []
    return [Path(found)] if isinstance(found, str) else []
