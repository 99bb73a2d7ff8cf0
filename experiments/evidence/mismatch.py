"""What an evaluation with --mismatch says of single tokens: log xi by position and by compactions, engine noise by length. For question E."""

import json
from pathlib import Path
from typing import Any

import numpy as np

SPAN = 64
"""Response tokens of a bin."""
VETO = 1e-4


def by_position(evaluation: Path) -> dict[str, dict[str, list[list[float]]]]:
    """For each cache: `xi`, rows of (first position, tokens, mean |log xi|, mean k3, share of tokens under the veto);
    `compactions`, the same by how many the cache had been through; `noise`, rows of (shortest response, responses, mean
    |sampler - replay|)."""
    samples = [json.loads(line) for line in (evaluation / "samples.jsonl").read_text().splitlines()]
    chunks = [json.loads(line) for line in (evaluation / "chunks.jsonl").read_text().splitlines()]
    caches = json.loads((evaluation / "results.json").read_text())["asked"]["settings"]
    found: dict[str, dict[str, list[Any]]] = {}
    for chunk in chunks:
        mine, samples = samples[: chunk["samples"]], samples[chunk["samples"] :]
        kept = found.setdefault(chunk["setting"], {"log_xi": [], "places": [], "compactions": [], "tokens": [], "noise": []})
        kept["log_xi"].append(np.load(evaluation / chunk["log_xi"]).astype(np.float64))
        for sample in mine:
            places = np.arange(sample["tokens"])
            kept["places"].append(places)
            kept["compactions"].append(compactions(places, sample["prompt_tokens"], caches[chunk["setting"]]))
        kept["tokens"] += [sample["tokens"] for sample in mine]
        kept["noise"] += [sample["noise"] for sample in mine]
    return {setting: _binned(**kept) for setting, kept in found.items()}


def compactions(places: np.ndarray, prompt: int, cache: dict[str, Any]) -> np.ndarray:
    """How many there were before each token: one for every full interval once prompt and response exceed the budget."""
    if cache["policy"] == "full":
        return np.zeros_like(places)
    first = max(0, (cache["budget"] - prompt) // cache["interval"] + 1)
    return np.maximum(0, places // cache["interval"] - first + 1)


def _binned(log_xi: list, places: list, compactions: list, tokens: list, noise: list) -> dict[str, list[list[float]]]:
    log_ratios, lengths, noises = np.concatenate(log_xi), np.array(tokens) // SPAN, np.array(noise)
    noise_rows = [
        [number * SPAN, int((lengths == number).sum()), noises[lengths == number].mean()] for number in np.unique(lengths)
    ]
    return {
        "xi": _rows(log_ratios, np.concatenate(places) // SPAN * SPAN),
        "compactions": _rows(log_ratios, np.concatenate(compactions)),
        "noise": [[float(value) for value in row] for row in noise_rows],
    }


def _rows(log_ratios: np.ndarray, keys: np.ndarray) -> list[list[float]]:
    rows = []
    for key in np.unique(keys):
        here = log_ratios[keys == key]
        k3 = np.expm1(here) - here
        rows.append([key, len(here), np.abs(here).mean(), k3.mean(), (here < np.log(VETO)).mean()])
    return [[float(value) for value in row] for row in rows]
