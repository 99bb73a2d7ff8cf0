"""Write trained weights as a Hugging Face folder that transformers and vLLM can load, together with the KV settings."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import FORMAT, KV
from ..disk import refusal
from ..errors import UserError
from ..kv.statistics import FILE as STATISTICS
from ..kv.statistics import Statistics, save
from .actor import Actor
from .four_bit import is_four_bit
from .stored_kv import FILE
from .stored_statistics import ENTRY, described

CARD = "README.md"
"""Name of the model card, which the hub shows."""


def write_model(
    folder: Path,
    actor: Actor,
    tokenizer: PreTrainedTokenizerBase,
    kv: KV,
    statistics: Statistics | None = None,
    *,
    merge: bool = False,
    card: str | None = None,
) -> None:
    """Write the full model or, with LoRA and without `merge`, the adapter. sparse_rl.json holds the KV settings of the training
    run and names the file of statistics, if there is one. `card` is the text of README.md.

    The folder is renamed into place when it is complete.
    """
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        whole = merge or actor.peft is None  # the sampler holds all weights; a sharded learner holds only a part
        actor.merge() if whole else actor.restore()
        (actor.sampler if whole else actor.peft).save_pretrained(partial)  # type: ignore[union-attr]
        tokenizer.save_pretrained(partial)
        settings: dict[str, Any] = {"format": FORMAT, "kv": kv.model_dump(mode="json", exclude={"target_rejected"})}
        if not merge and is_four_bit(actor.learner):
            settings["base"] = "4bit"
        save(statistics or {}, partial)
        if statistics:
            settings[ENTRY] = described(partial / STATISTICS)
        (partial / FILE).write_text(json.dumps(settings, indent=1) + "\n")
        if card is not None:  # replaces peft's card
            (partial / CARD).write_text(card, encoding="utf-8")
        # the mode from the umask: safetensors creates files that only the owner can read
        mode = (partial / FILE).stat().st_mode
        for file in partial.iterdir():
            file.chmod(mode)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except Exception as error:  # safetensors raises its own error for a full disk
        reason, remedy = refusal(error, folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"The model could not be written to {folder} ({reason}): {remedy} or choose another folder."
        ) from error
