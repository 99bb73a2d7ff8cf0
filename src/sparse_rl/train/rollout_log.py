"""Write rollouts/step-N.parquet: some rollouts of each step, one row per rollout, rejected rollouts first."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from ..rollout.graded import text_of

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("dense_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float32()),
        ("verdict", pa.bool_()),
        ("advantage", pa.float32()),
        ("rejected", pa.bool_()),
        ("finish", pa.string()),
        ("answer", pa.string()),
        ("evicted_at", pa.list_(pa.int32())),
        ("evicted_at_shape", pa.list_(pa.int32())),
    ]
)


def write(
    path: Path,
    step: int,
    samples: list,
    rejected: list[bool],
    dense: list,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: int,
    traces: int,
) -> None:
    """Write the file of one step. `rejected` and the `dense` log-probs are in the order of the samples."""
    order = logged(rejected, [sample.rollout.trace is not None for sample in samples], rollouts, traces)
    rows = []
    for index in order:
        with_trace = samples[index].rollout.trace is not None and traces > 0
        text = text_of(samples[index].rollout, tokenizer)
        rows.append(_row(step, samples[index], text, rejected[index], dense[index], with_trace))
        traces -= with_trace
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")
    partial.replace(path)


def logged(rejected: list[bool], recorded: list[bool], rollouts: int, traces: int) -> list[int]:
    """Return the indices of the rollouts to write: rejected ones first, and `traces` of them with recorded evictions."""
    order = sorted(range(len(rejected)), key=lambda index: (not rejected[index], not recorded[index]))
    with_trace = [index for index in order if recorded[index]][: min(traces, rollouts)]
    others = [index for index in order if index not in with_trace][: rollouts - len(with_trace)]
    return sorted([*with_trace, *others], key=lambda index: (not rejected[index], index))


def _row(step: int, sample: Any, text: str, rejected: bool, dense: Any, with_trace: bool) -> dict[str, Any]:
    rollout = sample.rollout
    evicted_at = rollout.evicted_at if with_trace else None
    prompt = sample.example.prompt
    return {
        "step": step,
        "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        "text": text,
        "prompt_tokens": rollout.prompt,
        "tokens": rollout.response,
        "sampler_logprobs": rollout.logprobs.numpy(),
        "dense_logprobs": dense.cpu().numpy(),
        "reward": sample.reward,
        "verdict": sample.reward is not None,
        "advantage": sample.advantage,
        "rejected": rejected,
        "finish": rollout.finish,
        "answer": sample.example.answer,
        "evicted_at": None if evicted_at is None else evicted_at.flatten().numpy(),
        "evicted_at_shape": None if evicted_at is None else list(evicted_at.shape),
    }
