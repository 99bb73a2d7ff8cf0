"""Write trained weights as a Hugging Face folder that transformers and vLLM read, with the KV settings beside them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import KV
from ..disk import refusal
from ..errors import UserError
from .actor import Actor
from .stored_kv import FILE


def write_model(folder: Path, actor: Actor, tokenizer: PreTrainedTokenizerBase, kv: KV, *, merge: bool = False) -> None:
    """Write the whole model, or with LoRA the adapter unless `merge`. sparse_rl.json holds the settings it was trained
    with.

    The folder appears when it is complete.
    """
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        whole = merge or actor.peft is None  # the sampler is whole; a sharded learner holds only a part
        (actor.sampler if whole else actor.peft).save_pretrained(partial)  # type: ignore[union-attr]
        tokenizer.save_pretrained(partial)
        settings: dict[str, Any] = {"kv": kv.model_dump(mode="json")}
        (partial / FILE).write_text(json.dumps(settings, indent=1) + "\n")
        mode = (partial / FILE).stat().st_mode  # the umask's mode; safetensors creates files that only the owner can read
        for file in partial.iterdir():
            file.chmod(mode)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except Exception as error:  # safetensors raises its own error for a full disk
        reason, remedy = refusal(error, folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"The model could not be written to {folder} ({reason}): {remedy} or name another folder.") from error
