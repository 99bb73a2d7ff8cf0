"""Properties of the planned families that config.json does not state: norms, biases, windows and defaults."""

from dataclasses import dataclass
from typing import Any, Literal

LAYER_TYPES = ("full_attention", "sliding_attention")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One `model_type`. Defaults are those of transformers, for a config.json that omits the key."""

    norms: int = 2
    """Norms of the hidden states in a layer."""
    parallel: bool = False
    """True if attention and MLP read the output of the same norm."""
    norm_copies: tuple[int, int] = (4, 0)
    """Bytes per element that an uncompiled norm saves for the gradient of its input and of its weight, in which 0 is one
    element of the model's dtype."""
    qk_norm: Literal["", "head", "width"] = ""
    """Norms of queries and keys: none, over each head, or over all heads."""
    head_dim: int | None = None
    """Default head dimension; None for the hidden size divided by the number of heads."""
    grouped: bool = True
    """True if config.json must state the number of key and value heads."""
    tied: bool = False
    attention_bias: bool = False
    window: int | None = None
    pattern: int = 0
    """Every `pattern`-th layer sees all tokens, if config.json lists no layer types."""
    sinks: bool = False


FAMILIES = {
    "llama": Family(grouped=False),
    "mistral": Family(window=4096),
    "qwen2": Family(window=4096),
    "qwen3": Family(window=4096, qk_norm="head", head_dim=128),
    "gemma2": Family(norms=4, norm_copies=(4, 4), head_dim=256, tied=True, window=4096, pattern=2),
    "gemma3_text": Family(norms=4, norm_copies=(4, 4), qk_norm="head", head_dim=256, tied=True, window=4096, pattern=6),
    "olmo3": Family(norm_copies=(4, 4), qk_norm="width", grouped=False, window=4096, pattern=4),
    "cohere2": Family(norms=1, parallel=True, norm_copies=(8, 4), grouped=False, tied=True, window=4096, pattern=4),
    "gpt_oss": Family(norm_copies=(4, 4), head_dim=64, attention_bias=True, window=128, pattern=2, sinks=True),
}


def biases_of(kind: str, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the linear layers with a bias."""
    if kind in ("mistral", "qwen2"):
        return ATTENTION[:3] if kind == "qwen2" else ()
    biases = ATTENTION if config.get("attention_bias", FAMILIES[kind].attention_bias) else ()
    return biases + (MLP if kind == "llama" and config.get("mlp_bias") else ())


def windows_of(kind: str, config: dict[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and the layers that have it; (None, ()) if none has."""
    family, layers = FAMILIES[kind], range(config["num_hidden_layers"])
    window, types = config.get("sliding_window", family.window), config.get("layer_types")
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if kind == "llama" or not window:
        return None, ()
    if kind == "mistral":
        windowed = list(layers)
    elif types is not None:
        windowed = [layer for layer, name in enumerate(types) if name == "sliding_attention"]
    elif kind.startswith("qwen"):
        windowed = [layer for layer in layers if layer >= config.get("max_window_layers", 28)]
    else:
        windowed = [layer for layer in layers if (layer + 1) % (config.get("sliding_window_pattern") or family.pattern)]
    return (window, tuple(windowed)) if windowed else (None, ())
