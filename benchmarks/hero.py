"""Draw the figure of the README, decode speed against response length in the same KV memory:

    python benchmarks/hero.py

Lines are decode steps of both our caches (speed.json). Points are whole calls of vLLM and ours (same-memory-256.json).
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parents[1] / "docs" / "hero.svg"
SLOTS = 256


def main() -> None:
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "sparse-rl"
    speed, calls = (json.loads((RESULTS / name).read_text()) for name in ("speed.json", "same-memory-256.json"))
    rows = [row for row in speed["sweep"] if row["slots"] == SLOTS]
    lengths = [row["max_tokens"] for row in rows]
    figure, axis = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for key, colour, label in (
        ("sparse_tokens_per_s", "C0", "sparse-rl, R-KV 512 + 128"),
        ("dense_tokens_per_s", "C7", "sparse-rl, dense, paged without waste"),
    ):
        axis.plot(lengths, [row[key] for row in rows], "o-", color=colour, label=f"{label}: decode steps")
    for who, colour, label in (
        ("ours", "C0", "sparse-rl, R-KV 512 + 128"),
        ("vllm", "C1", f"vLLM {calls['vllm']['version']}"),
    ):
        value = calls[who]["tokens_per_s"]
        axis.scatter([calls["longest"]], [value], 90, marker="D", color=colour, label=f"{label}: whole call", zorder=3)
        axis.annotate(f"{value:,.0f}", (calls["longest"], value), (9, -4), textcoords="offset points", fontweight="bold")
    gib = (speed["sweep"][0]["kv_bytes"] + speed["sweep"][0]["side_bytes"]) / speed["sweep"][0]["slots"] * SLOTS / 2**30
    axis.set(
        xscale="log",
        yscale="log",
        ylim=(3e3, 1.3e5),
        xlim=(900, 42e3),
        xlabel="longest response, tokens (uniform up to it)",
        ylabel="tokens/s",
        title=f"The same {gib:.1f} GiB of KV memory: {speed['model']} shapes, one H200",
    )
    axis.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axis.minorticks_off()
    axis.set_yticks([5e3, 1e4, 2e4, 5e4, 1e5], ["5,000", "10,000", "20,000", "50,000", "100,000"])
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", frameon=False, loc="lower left")
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
