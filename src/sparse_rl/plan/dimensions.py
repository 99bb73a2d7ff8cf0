"""Read a model's dimensions from its config.json, without loading weights. Memory and time are computed from them."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..models.folder import checked_config, context_length
from ..models.shapes import SHAPES
from .families import FAMILIES, Family, biases_of, windows_of

TINY = Path(__file__).parents[1] / "models" / "tiny"
HUB_SHAPES = {
    **{
        f"Qwen/Qwen2.5-{size}{kind}": size
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
        for kind in ("", "-Instruct")
    },
    **{f"meta-llama/Llama-3.2-1B{kind}": "1B" for kind in ("", "-Instruct")},
    **{f"Qwen/Qwen3-{size}": size for size in ("4B", "8B")},
    "smollm2-135m": "135M",
}
"""Models whose shape ships with the package, so that planning them needs no download."""
PLANNED = tuple(FAMILIES)
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder of one of the planned families."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    """True if the LM head shares the weights of the embedding."""
    biases: tuple[str, ...] = ()
    """Names of the linear layers with a bias."""
    context: int | None = None
    """Maximum number of tokens of a sequence, if the config states one."""
    window: int | None = None
    """Tokens that a query of a windowed layer sees, itself included; None if no layer has a window."""
    windowed: tuple[int, ...] = ()
    """Windowed layers, ascending."""
    experts: int = 0
    """MLPs of a layer of which each token uses `active_experts`; 0 for one MLP."""
    active_experts: int = 1
    softcap: bool = False
    """True if the logits of attention are soft-capped."""
    family: Family = FAMILIES["llama"]
    model: str = "the model"
    """Class of the model, or its name if config.json does not state the class."""

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def plain(self) -> bool:
        """True if attention has no soft caps and no learned sinks."""
        return not self.softcap and not self.family.sinks

    @property
    def takes_codes(self) -> bool:
        """True if `kv.dtype` = 8bit or 4bit makes the cache smaller. Windows stay in the model's dtype."""
        return self.full.layers > 0

    @cached_property
    def full(self) -> "Dimensions":
        """Dimensions of the layers without a window alone: those whose cache a policy bounds."""
        return replace(self, layers=self.layers - len(self.windowed), window=None, windowed=()) if self.windowed else self

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (input width, output width) of each linear layer of a block, by name. Experts are no linear layers."""
        attention = {
            "q_proj": (self.hidden, self.q_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.q_width, self.hidden),
        }
        if self.experts:
            return attention
        return attention | {
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def norm_params(self) -> int:
        """Return the weights of the norms of a layer."""
        of_heads = {"": 0, "head": 2 * self.head_dim, "width": self.q_width + self.kv_width}[self.family.qk_norm]
        return self.family.norms * self.hidden + of_heads

    @property
    def expert_params(self) -> int:
        """Return the weights of one expert, with the biases of its gate, up and down projections."""
        return 3 * self.hidden * self.intermediate + 2 * self.intermediate + self.hidden

    @cached_property
    def layer_params(self) -> int:
        matrices = sum(inputs * outputs for inputs, outputs in self.linears.values())
        biases = sum(self.linears[name][1] for name in self.biases)
        experts = self.experts * (self.expert_params + self.hidden + 1)  # with a row and a bias of the router each
        return matrices + biases + self.norm_params + experts + (self.q_heads if self.family.sinks else 0)

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def largest_weight(self) -> int:
        """Return the number of elements of the largest weight."""
        return max(self.embedding_params, self.hidden * self.intermediate * max(1, 2 * self.experts))

    @cached_property
    def params(self) -> int:
        tables = 1 if self.tied else 2
        return self.layers * self.layer_params + tables * self.embedding_params + self.hidden

    @property
    def active_params(self) -> int:
        """Return the number of parameters used in matrix products per token: all, except an untied input embedding and the
        experts that the token does not use."""
        idle = self.layers * (self.experts - self.active_experts) * self.expert_params if self.experts else 0
        return self.params - (0 if self.tied else self.embedding_params) - idle

    def read_params(self, tokens: int) -> float:
        """Return the number of parameters that a pass over so many tokens reads, if tokens choose experts evenly."""
        if not self.experts:
            return self.active_params
        used = self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens)
        return self.active_params + self.layers * (used - self.active_experts) * self.expert_params

    def adapted(self, targets: str) -> list[str]:
        """Return the names of the linear layers of a block that `model.lora.targets` selects."""
        if targets == "all-linear":
            return list(self.linears)
        names = {name.strip() for name in targets.split(",")}
        return [name for name in self.linears if name in names]

    def adapted_params(self, targets: str) -> int:
        """Return the number of base weights in the layers that have adapters."""
        return self.layers * sum(self.linears[name][0] * self.linears[name][1] for name in self.adapted(targets))

    def adapter_params(self, targets: str, rank: int) -> int:
        return self.layers * rank * sum(sum(self.linears[name]) for name in self.adapted(targets))


def dimensions(path: str) -> Dimensions:
    """Return the dimensions of a model. `path` is the name of a shape, a folder, `tiny` or a hub id."""
    return from_config(read_config(path), path)


def from_config(config: dict[str, Any], name: str) -> Dimensions:
    kind = config.get("model_type") or "of no model_type"
    if kind not in PLANNED:
        raise UserError(
            f"{name} is {kind}, which plan does not support: it supports {', '.join(PLANNED)}. Training still works, "
            "without a plan."
        )
    family = FAMILIES[kind]
    needed: tuple[str, ...] = (*NEEDED, "num_key_value_heads") if family.grouped else NEEDED
    needed += ("num_local_experts", "num_experts_per_tok") if kind == "gpt_oss" else ()
    if missing := [key for key in needed if not config.get(key)]:
        raise UserError(f"{name} cannot be planned: its config.json lacks {', '.join(missing)}.")
    heads = config["num_attention_heads"]
    window, windowed = windows_of(kind, config)
    experts = {"experts": config["num_local_experts"], "active_experts": config["num_experts_per_tok"]} if family.sinks else {}
    return Dimensions(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        q_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        biases=biases_of(kind, config),
        context=context_length(
            config.get("max_position_embeddings"),
            config.get("rope_parameters") or config.get("rope_scaling"),
            config.get("original_max_position_embeddings"),
        ),
        window=window,
        windowed=windowed,
        **experts,
        softcap=kind == "gemma2" and config.get("attn_logit_softcapping", True) is not None,
        family=family,
        model=next(iter(config.get("architectures") or ()), name),
    )


def read_config(path: str) -> dict[str, Any]:
    """Return the config.json of a model as a dict, or the equivalent values of a named shape."""
    folder = TINY if path == "tiny" and not Path(path).is_dir() else Path(path)
    shape = path if path in SHAPES else HUB_SHAPES.get(path, "")
    if shape in SHAPES and not folder.is_dir():
        fields = dict(SHAPES[shape])
        return {"model_type": str(fields.pop("architecture")).lower(), **fields}
    file = folder / "config.json"
    if not file.is_file():
        if folder.is_dir():
            raise UserError(f"The folder {path} cannot be planned: it has no config.json.")
        file = _from_hub(path)
    return checked_config(file.parent)


def _from_hub(path: str) -> Path:
    shapes = f"a shape ({', '.join(SHAPES)}), a folder, a hub id, tiny or a recipe"
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise UserError(f"No model is named {path!r}: pass {shapes}.")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(path, "config.json")
        return Path(cached if isinstance(cached, str) else hf_hub_download(path, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be planned: its config.json is neither in the local cache nor on the hub "
            f"({type(error).__name__}): pass {shapes}."
        ) from error
