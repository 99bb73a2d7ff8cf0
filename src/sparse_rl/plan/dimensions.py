"""Read a model's dimensions from its config.json, without loading weights. Memory and time are computed from them."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config.recipe import recipe_names
from ..errors import UserError
from ..models.folder import checked_config, context_length
from ..models.shapes import SHAPES
from ..sizes import codes_problem
from ..text import did_you_mean
from .families import FAMILIES, LAYER_TYPES, Family, biases_of, windows_of

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
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Linear:
    """Linear layers of one name and shape."""

    name: str
    inputs: int
    outputs: int
    count: int
    in_all_linear: bool = True
    """True if `model.lora.targets = all-linear` selects them."""

    @property
    def params(self) -> int:
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a model."""

    params: int
    in_layers: int
    """Weights of all layers."""
    largest_layer: int
    largest_weight: int
    embedding: int
    routed: int
    """Weights of all experts among which routers choose."""
    quantised: int
    """Weights that `model.lora.base = 4bit` stores in 4 bits: those of the linear layers inside the layers."""
    linears: tuple[Linear, ...]


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a decoder."""

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
    windowed_heads: tuple[int, int, int] | None = None
    """Query heads, kv heads and head dimension of the windowed layers, if they differ from those of the other layers."""
    readers: tuple[tuple[int, int], ...] = ()
    """Pairs (layer without keys, layer whose keys it reads)."""
    attention_free: tuple[int, ...] = ()
    """Layers without attention, ascending."""
    states: tuple[tuple[int, int], ...] = ()
    """Elements of the state of a sequence in each recurrent layer: in the model's dtype, and in float32."""
    experts: int = 0
    """MLPs of a layer of which each token uses `active_experts`; 0 for one MLP."""
    active_experts: int = 1
    softcap: bool = False
    """True if the logits of attention are soft-capped."""
    family: Family = FAMILIES["llama"]
    model: str = "the model"
    """Class of the model, or its name if config.json does not state the class."""
    counted: Weights | None = None
    """Weights of a model without formulas, counted in `built.py`."""
    estimated_width: int = 0
    """Sum of input and output widths of the linear layers of the widest layer and of the experts that a token uses. Activations
    are estimated from it. 0 if every layer is attention and one MLP."""

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def needs_flex(self) -> bool:
        """True if attention has soft caps or learned sinks, which FlexAttention computes."""
        return self.softcap or self.family.sinks

    @property
    def plain(self) -> bool:
        """True if the model has no soft caps, learned sinks or recurrent layers."""
        return not self.needs_flex and not self.states

    @property
    def takes_codes(self) -> bool:
        """True if `kv.dtype` = 8bit and 4bit make the cache smaller. Windows stay in the model's dtype."""
        return self.full.layers > 0 and not any(codes_problem(self.full.head_dim, dtype) for dtype in ("8bit", "4bit"))

    @property
    def takes_4bit_base(self) -> bool:
        """True if at least half of the weights of the layers are in linear layers, as `model.lora.base = 4bit` requires."""
        return 2 * self.weights.quantised >= self.weights.in_layers

    @cached_property
    def full(self) -> "Dimensions":
        """Dimensions of only the layers that attend to all tokens, whose cache a policy bounds."""
        others = len(self.windowed) + len(self.attention_free) + len(self.readers)
        if not others and not self.states:
            return self
        return self._only(self.layers - others, (self.q_heads, self.kv_heads, self.head_dim))

    @cached_property
    def local(self) -> "Dimensions":
        """Dimensions of only the windowed layers."""
        return self._only(len(self.windowed), self.windowed_heads or (self.q_heads, self.kv_heads, self.head_dim))

    def _only(self, layers: int, heads: tuple[int, int, int]) -> "Dimensions":
        """Return the dimensions of `layers` attention layers."""
        q_heads, kv_heads, head_dim = heads
        attention = replace(self, layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
        return replace(attention, window=None, windowed=(), windowed_heads=None, readers=(), attention_free=(), states=())

    @property
    def attending(self) -> tuple[int, int]:
        """Number of layers that attend to all tokens, and of those that attend to a window, with or without own keys."""
        local = sum(source in self.windowed for _, source in self.readers)
        return self.full.layers + len(self.readers) - local, len(self.windowed) + local

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of the recurrent states of a sequence."""
        return sum(own * itemsize + 4 * in_float32 for own, in_float32 in self.states)

    def largest_state_bytes(self, itemsize: int) -> int:
        """Return the bytes of the largest recurrent state of a layer and a sequence."""
        return max((own * itemsize + 4 * in_float32 for own, in_float32 in self.states), default=0)

    @cached_property
    def weights(self) -> Weights:
        return self.counted or weights_by_formula(self)

    @property
    def params(self) -> int:
        return self.weights.params

    @property
    def layer_params(self) -> int:
        return self.weights.largest_layer

    @property
    def embedding_params(self) -> int:
        return self.weights.embedding

    @property
    def largest_weight(self) -> int:
        """Number of elements of the largest weight."""
        return self.weights.largest_weight

    @cached_property
    def widest(self) -> int:
        """Largest width of a linear layer's input or output."""
        return max(max(linear.inputs, linear.outputs) for linear in self.weights.linears)

    @property
    def active_params(self) -> int:
        """Number of parameters used in matrix products per token: all, except an untied input embedding and unused experts."""
        used = self.weights.routed * self.active_experts // self.experts if self.experts else 0
        return self.params - (0 if self.tied else self.embedding_params) - self.weights.routed + used

    def read_params(self, tokens: int) -> float:
        """Return the number of parameters that a pass over `tokens` tokens reads, if tokens choose experts evenly."""
        if not self.experts:
            return self.active_params
        share = self.active_experts / self.experts
        return self.active_params + (1 - (1 - share) ** tokens - share) * self.weights.routed

    def adapted(self, targets: str) -> list[Linear]:
        """Return the linear layers that `model.lora.targets` selects."""
        if targets == "all-linear":
            return [linear for linear in self.weights.linears if linear.in_all_linear]
        names = {name.strip() for name in targets.split(",")}
        return [linear for linear in self.weights.linears if linear.name in names]

    def adapted_params(self, targets: str) -> int:
        """Return the number of base weights in the layers that have adapters."""
        return sum(linear.params for linear in self.adapted(targets))

    def adapter_params(self, targets: str, rank: int) -> int:
        return rank * sum(linear.count * (linear.inputs + linear.outputs) for linear in self.adapted(targets))


def weights_by_formula(dims: Dimensions) -> Weights:
    """Return the weights of a model of one of `FAMILIES`. Experts do not count as linear layers."""
    hidden, intermediate, experts = dims.hidden, dims.intermediate, dims.experts
    widths = {
        "q_proj": (hidden, dims.q_width),
        "k_proj": (hidden, dims.kv_width),
        "v_proj": (hidden, dims.kv_width),
        "o_proj": (dims.q_width, hidden),
    }
    if not experts:
        widths |= dict.fromkeys(("gate_proj", "up_proj"), (hidden, intermediate)) | {"down_proj": (intermediate, hidden)}
    linears = tuple(Linear(name, *each, dims.layers) for name, each in widths.items())
    expert_params = 3 * hidden * intermediate + 2 * intermediate + hidden  # with the biases of its projections
    norm_params = {"": 0, "head": 2 * dims.head_dim, "width": dims.q_width + dims.kv_width}[dims.family.qk_norm]
    layer_params = sum(linear.inputs * linear.outputs for linear in linears) + sum(widths[name][1] for name in dims.biases)
    layer_params += dims.family.norms * hidden + norm_params + (dims.q_heads if dims.family.sinks else 0)
    layer_params += experts * (expert_params + hidden + 1)  # with a row and a bias of the router each
    embedding = dims.vocab * hidden
    return Weights(
        params=dims.layers * layer_params + (1 if dims.tied else 2) * embedding + hidden,
        in_layers=dims.layers * layer_params,
        largest_layer=layer_params,
        largest_weight=max(embedding, hidden * intermediate * max(1, 2 * experts)),
        embedding=embedding,
        routed=dims.layers * experts * expert_params,
        quantised=sum(linear.params for linear in linears),
        linears=linears,
    )


def dimensions(path: str) -> Dimensions:
    """Return the dimensions of a model. `path` is the name of a shape, a folder, `tiny` or a hub id."""
    return from_config(read_config(path), path)


def from_config(config: dict[str, Any], name: str) -> Dimensions:
    """Return the dimensions of a model with this config.json, by the formulas of its family. Without formulas, build the model,
    which imports torch."""
    kind = config.get("model_type") or "of no model_type"
    types = config.get("layer_types") or []
    formulas_hold = len(types) in (0, config.get("num_hidden_layers", len(types))) and all(
        each in LAYER_TYPES for each in types
    )
    if kind not in FAMILIES or not formulas_hold:
        from .built import from_model

        return from_model(config, name)
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
        raise UserError(f"No model is named {path!r}: {did_you_mean(path, recipe_names(), f'pass {shapes}.')}")
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
