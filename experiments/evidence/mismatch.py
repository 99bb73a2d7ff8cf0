"""What an evaluation with --mismatch says of single tokens: log xi by position, engine noise by length. For question E."""

import json
from pathlib import Path
from typing import Any

import numpy as np

SPAN = 64
"""Response tokens of a bin."""
VETO = 1e-4


def by_position(evaluation: Path) -> dict[str, dict[str, list[list[float]]]]:
    """For each cache: `xi`, rows of (first position, tokens, mean |log xi|, mean k3, share of tokens under the veto), and
    `noise`, rows of (shortest response, responses, mean |sampler - replay|)."""
    samples = [json.loads(line) for line in (evaluation / "samples.jsonl").read_text().splitlines()]
    chunks = [json.loads(line) for line in (evaluation / "chunks.jsonl").read_text().splitlines()]
    found: dict[str, dict[str, list[Any]]] = {}
    for chunk in chunks:
        mine, samples = samples[: chunk["samples"]], samples[chunk["samples"] :]
        log_xi = np.load(evaluation / chunk["log_xi"]).astype(np.float64)
        places = np.concatenate([np.arange(sample["tokens"]) for sample in mine])
        assert len(places) == len(log_xi)
        kept = found.setdefault(chunk["setting"], {"log_xi": [], "places": [], "tokens": [], "noise": []})
        kept["log_xi"].append(log_xi)
        kept["places"].append(places)
        kept["tokens"] += [sample["tokens"] for sample in mine]
        kept["noise"] += [sample["noise"] for sample in mine]
    return {setting: _binned(**kept) for setting, kept in found.items()}


def _binned(log_xi: list, places: list, tokens: list, noise: list) -> dict[str, list[list[float]]]:
    log_ratios, bins = np.concatenate(log_xi), np.concatenate(places) // SPAN
    lengths, noises = np.array(tokens) // SPAN, np.array(noise)
    xi_rows, noise_rows = [], []
    for number in range(int(bins.max()) + 1):
        here, of_length = log_ratios[bins == number], noises[lengths == number]
        k3 = np.expm1(here) - here
        xi_rows.append([number * SPAN, len(here), np.abs(here).mean(), k3.mean(), (here < np.log(VETO)).mean()])
        if len(of_length):
            noise_rows.append([number * SPAN, len(of_length), of_length.mean()])
    return {
        "xi": [[float(value) for value in row] for row in xi_rows],
        "noise": [[float(v) for v in row] for row in noise_rows],
    }
