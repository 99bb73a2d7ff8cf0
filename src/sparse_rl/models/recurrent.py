"""Recurrent layers of hybrid models: the view of a pass runs them, as it runs attention.

Our passes pack sequences into one row. A recurrent layer would carry its state from one sequence into the next. `bind` therefore
hands the layer to the view, which runs the model's own code on one row per sequence: the parallel form for prompts and in replay,
and one token with the slot's state in decode. Without a view, layers run as before.
"""

# B rows, T tokens of each, N packed tokens, D hidden dimension

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..errors import UserError, first_line, notice
from ..kv.states import States

CONVOLUTION = "causal_conv1d"
"""Package of the only kernels without matrix products, and prefix of their functions in transformers."""
DELTA_NET, SHORT_CONV, MAMBA = ("fla", CONVOLUTION), (CONVOLUTION,), ("mamba_ssm", CONVOLUTION)
MIXERS = {
    "Qwen3NextGatedDeltaNet": DELTA_NET,
    "Qwen3_5GatedDeltaNet": DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": DELTA_NET,
    "Lfm2ShortConv": SHORT_CONV,
    "Lfm2MoeShortConv": SHORT_CONV,
    "FalconH1Mixer": MAMBA,
    "NemotronHMamba2Mixer": MAMBA,
    "GraniteMoeHybridMambaLayer": MAMBA,
    "BambaMixer": MAMBA,
    "OlmoHybridGatedDeltaNet": DELTA_NET,
}
"""Supported recurrent layers, by their class in transformers, and the packages with their fast kernels."""
FAMILIES = "Qwen3.5, Qwen3-Next, OLMo-Hybrid, LFM2, Falcon-H1, Nemotron-H, Granite 4 and Bamba"
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
STATES = ("conv_states", "recurrent_states")
"""Names of the state tensors in transformers. A layer may have only some of them."""


class RecurrentView(Protocol):
    def recur(self, layer: int, mixer: "Mixer", hidden_BTD: Tensor) -> Tensor:
        """Return the output of a recurrent layer for the tokens of this pass."""
        ...


@dataclass(frozen=True)
class Mixer:
    """A recurrent layer of a model, for rows of one sequence each."""

    module: nn.Module
    own: Callable[..., Tensor]
    """The forward of the module's class."""
    cache_name: str
    """Name of its argument for a cache."""

    def __call__(self, hidden_BTD: Tensor) -> Tensor:
        """Run whole sequences, without a state."""
        return self._run(hidden_BTD, None)

    def start(self, hidden_BTD: Tensor) -> tuple[Tensor, States]:
        """Run the first tokens of sequences. Return the output and the states after the last token."""
        held = LinearAttentionLayer()
        out_BTD = self._run(hidden_BTD, held)
        found = {name: getattr(held, name)[0] for name in STATES}
        return out_BTD, {name: tensor for name, tensor in found.items() if tensor is not None}

    def resume(self, hidden_BTD: Tensor, states: States) -> Tensor:
        """Run the next tokens of sequences, and update the states in place."""
        held = LinearAttentionLayer()
        for name, tensor in states.items():
            getattr(held, name)[0] = tensor
            getattr(held, f"is_{name}_initialized")[0] = True
        held.has_previous_state[0] = True
        held.conv_kernel_size[0] = states["conv_states"].shape[-1]
        return self._run(hidden_BTD, held)

    def _run(self, hidden_BTD: Tensor, held: LinearAttentionLayer | None) -> Tensor:
        layer = layer_of(self.module)
        cache = None if held is None else Cache(layers=[held] * (layer + 1))
        try:
            return self.own(self.module, hidden_BTD, **{self.cache_name: cache})
        except ImportError as error:
            raise UserError(
                f"Layer {layer} ({type(self.module).__name__}) needs kernels that are not installed ({first_line(error)}): "
                f"install {_packages(type(self.module))}, or use another model."
            ) from error


def layer_of(module: nn.Module) -> int:
    return int(module.layer_idx)  # type: ignore[arg-type]


def mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the recurrent layers that are supported."""
    return (module for module in model.modules() if type(module).__name__ in MIXERS)


def bind(model: nn.Module) -> None:
    """Let views run the model's recurrent layers. Patch the forward of their classes, once per process. Print a notice if fast
    kernels are missing on a GPU."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_no_fallback_warning)  # the notice replaces it
    for kind in {type(module) for module in mixers(model)}:
        if not hasattr(kind.forward, "sparse_rl"):
            kind.forward = _viewed(kind.forward)
            _use_references(sys.modules[kind.__module__])
        parameter = next(model.parameters())
        used = [name for name in MIXERS[kind.__name__] if name == CONVOLUTION or not _is_exact([parameter])]
        missing = [name for name in used if find_spec(name) is None]
        if missing and parameter.is_cuda:
            notice(
                f"{kind.__name__} runs without fast kernels, which is slower and takes more memory than planned: install "
                f"{' and '.join(DISTRIBUTIONS[name] for name in missing)}."
            )


def _no_fallback_warning(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def view_arguments(model: nn.Module, view: Any) -> dict[str, Any]:
    """Return the forward arguments through which a view reaches attention and recurrent layers."""
    if str(getattr(model.config, "model_type", "")).startswith("lfm2"):
        return {"sparse_view": view, "seq_idx": view}  # transformers 5.17 passes only seq_idx to its convolutions
    return {"sparse_view": view}


def _packages(kind: type) -> str:
    return " and ".join(DISTRIBUTIONS[name] for name in MIXERS[kind.__name__])


def _viewed(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward that lets the view of the pass, if any, run the layer. This part is never compiled, because it depends on
    the view."""
    through_view = torch.compiler.disable(_through_view)

    @functools.wraps(own)
    def forward(module: nn.Module, hidden_states: Tensor, *args: Any, sparse_view: Any = None, **kwargs: Any) -> Tensor:
        if sparse_view is None and hasattr(kwargs.get("seq_idx"), "recur"):
            sparse_view = kwargs["seq_idx"]
        if sparse_view is None:
            return own(module, hidden_states, *args, **kwargs)
        cache_name = "cache_params" if "cache_params" in kwargs else "past_key_values"
        return through_view(sparse_view, Mixer(module, own, cache_name), hidden_states)

    forward.sparse_rl = True  # type: ignore[attr-defined]
    return forward


def _through_view(view: RecurrentView, mixer: Mixer, hidden_BTD: Tensor) -> Tensor:
    return view.recur(layer_of(mixer.module), mixer, hidden_BTD)


def _use_references(source: ModuleType) -> None:
    """Wrap the functions with fast kernels of a transformers module in `with_reference`. Repeated calls change nothing.

    The package `kernels` replaces these functions with modules, which are left alone: transformers then chooses.
    """
    for name, function in inspect.getmembers(source, inspect.isfunction):
        if function.__module__ == source.__name__ and hasattr(function, "__wrapped__") and not hasattr(function, "sparse_rl"):
            setattr(source, name, with_reference(function))


def with_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, or its torch reference if the kernels would fail or round.

    They need a GPU. Those with matrix products round float32 to TF32, which torch does not by default.
    """
    reference = function.__wrapped__  # type: ignore[attr-defined]
    parameters, rounds = inspect.signature(reference).parameters, not function.__name__.startswith(CONVOLUTION)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx"))  # references ignore these
        if packed or (tensors[0].is_cuda and not (rounds and _is_exact(tensors))):
            return function(*args, **kwargs)
        return reference(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    chosen.sparse_rl = True  # type: ignore[attr-defined]
    return chosen


def _is_exact(tensors: Iterable[Tensor]) -> bool:
    """Return whether torch multiplies these tensors in full float32 precision."""
    return torch.get_float32_matmul_precision() == "highest" and all(each.dtype == torch.float32 for each in tensors)


def run_packed(mixer: Mixer, hidden_1ND: Tensor, bounds: Sequence[int]) -> Tensor:
    """Run packed sequences, one row each. `bounds` are their boundaries among the packed tokens.

    Rows are padded on the right, which does not change earlier outputs. Lengths in one pass differ by less than a factor of two.
    """
    sequences = hidden_1ND[0].split([stop - start for start, stop in pairwise(bounds)])
    outputs: list[Tensor] = list(sequences)
    for size in sorted({len(each).bit_length() for each in sequences}):
        members = [number for number, each in enumerate(sequences) if len(each).bit_length() == size]
        out_BTD = mixer(pad_sequence([sequences[number] for number in members], batch_first=True))
        for number, out_TD in zip(members, out_BTD, strict=True):
            outputs[number] = out_TD[: len(sequences[number])]
    return torch.cat(outputs)[None]
