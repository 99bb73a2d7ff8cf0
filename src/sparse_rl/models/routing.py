"""Routing replay: record the experts that the sampler's routers choose, and use the same experts in the learner.

Sampler and learner round differently and see different keys, so their routers choose different experts for some tokens. Rollout
Routing Replay (R3, arXiv 2510.11370) gives the learner the sampler's choices. Only the indices are replayed: the router computes
the weights of the experts from its own logits, so gradients reach it.

The view of a pass carries its routing (`view.routing`). A hook on each layer passes the routing on to the layer's router. The
hook also runs if gradient checkpointing runs the layer again. A supported router calls `topk` once, and the indices are the
chosen experts. That call is intercepted, so the rest of the router stays transformers' own code.
"""

# N tokens of a pass, T tokens of a prompt or a response, R routers, K experts per token, E experts

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..errors import UserError
from .compile import decoder_layers

ROUTERS = {
    "MixtralTopKRouter": "Mixtral",
    "Qwen2MoeTopKRouter": "Qwen2-MoE",
    "Qwen3MoeTopKRouter": "Qwen3-MoE",
    "Qwen3NextTopKRouter": "Qwen3-Next",
    "Qwen3_5MoeTopKRouter": "Qwen3.5-MoE",
    "OlmoeTopKRouter": "OLMoE",
    "FlexOlmoTopKRouter": "FlexOlmo",
    "GptOssTopKRouter": "GPT-OSS",
}
"""Classes of the supported routers, and their model families."""
MODULE_NAMES = ("Router", "Experts", "Moe", "MoE", "MoeBlock")
"""Ends of the class names of modules in mixture-of-experts layers."""
INSTALLED = "sparse_rl_routers"
"""Attribute of a model that holds its `Routers`. A copy of the model keeps it, as it keeps the hooks."""
ROUTING = "sparse_rl_routing"
"""Attribute of a router that holds the routing of the current pass."""


class Routing(Protocol):
    def choose(self, router: int, own_NK: Tensor) -> Tensor:
        """Return the experts that a router must use. `own_NK` are those with the highest scores."""
        ...


@dataclass(frozen=True)
class Routers:
    """Shape of the choices of a model's routers."""

    count: int
    top_k: int
    dtype: torch.dtype

    def recording(self, tokens: int, device: torch.device) -> "RecordedRouting":
        return RecordedRouting(torch.empty(tokens, self.count, self.top_k, dtype=self.dtype, device=device))


@dataclass(frozen=True)
class ExpertChoices:
    """Experts chosen for the tokens of a rollout, one or two bytes each. Samples of a prompt share the tensor of its choices."""

    prompt_TRK: Tensor
    response_TRK: Tensor
    """Choices of all response tokens except the last one, which was sampled but never fed."""


@dataclass
class RecordedRouting:
    """Routing of a pass whose choices are recorded. It writes to a fixed tensor, so that a CUDA graph can capture it."""

    choices_NRK: Tensor
    recorded: int = 0

    def choose(self, router: int, own_NK: Tensor) -> Tensor:
        self.choices_NRK[:, router] = own_NK
        self.recorded += 1
        return own_NK


class ReplayedRouting:
    """Routing of a pass that replays choices."""

    def __init__(self, choices_NRK: Tensor):
        self.choices_NRK = choices_NRK
        self.flips_R = torch.zeros(choices_NRK.shape[1], device=choices_NRK.device)
        """Number of tokens for which each router would choose other experts."""

    def choose(self, router: int, own_NK: Tensor) -> Tensor:
        chosen_NK = self.choices_NRK[:, router].long()
        found_NK = (own_NK[:, :, None] == chosen_NK[:, None]).any(dim=-1)
        self.flips_R[router] = (~found_NK.all(dim=-1)).sum()  # set, not added: checkpointing runs a layer twice
        return chosen_NK

    @property
    def flips_and_choices(self) -> Tensor:
        """[2]: number of pairs (token, router) with other experts, and of all pairs."""
        return torch.stack([self.flips_R.sum(), self.flips_R.new_tensor(self.choices_NRK[:, :, 0].numel())])


def install(model: PreTrainedModel) -> Routers:
    """Let the model's routers use the routing of a view, if it has one. Raise UserError if the routers are not supported."""
    if INSTALLED not in model.__dict__:
        model.__dict__[INSTALLED] = _install(model)
    return model.__dict__[INSTALLED]


def _install(model: PreTrainedModel) -> Routers:
    found = [(layer, each) for layer in decoder_layers(model) for each in layer.modules() if type(each).__name__ in ROUTERS]
    if not found:
        raise UserError(_unsupported(model))
    for index, (layer, router) in enumerate(found):
        if "forward" not in router.__dict__:  # else another model that shares the layer has installed it
            layer.register_forward_pre_hook(partial(_pass_on, index, router), with_kwargs=True)
            router.forward = partial(_route, router)
    first: Any = found[0][1]
    experts = len(first.weight)
    return Routers(len(found), first.top_k, torch.uint8 if experts <= 256 else torch.int16)


def _unsupported(model: PreTrainedModel) -> str:
    names = {type(module).__name__ for layer in decoder_layers(model) for module in layer.modules() if module is not layer}
    parts = sorted(name for name in names if name.endswith(MODULE_NAMES))
    if not parts:
        return f"{type(model).__name__} has no routers, so it does not support model.routing_replay = true: set it to false."
    return (
        f"{type(model).__name__} routes tokens by {', '.join(parts)}, which model.routing_replay = true does not support (it "
        f"supports {', '.join(ROUTERS.values())}): set it to false."
    )


def _pass_on(index: int, router: nn.Module, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    routing = getattr(kwargs.get("sparse_view"), "routing", None)
    router.__dict__[ROUTING] = None if routing is None else _ChosenExperts(routing, index)


@torch.compiler.disable
def _route(router: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the router's own forward, with the choices of the current pass."""
    plain, choices = type(router).forward, router.__dict__.get(ROUTING)
    if choices is None:
        return plain(router, *args, **kwargs)
    with choices:
        return plain(router, *args, **kwargs)


class _ChosenExperts(TorchFunctionMode):
    """Replace the indices of a router's `topk`, and its values by the scores of these indices."""

    def __init__(self, routing: Routing, router: int):
        super().__init__()
        self.routing, self.router = routing, router

    def __torch_function__(self, func, types, args=(), kwargs=None):
        top = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return top
        chosen_NK = self.routing.choose(self.router, top.indices)
        if chosen_NK is top.indices:
            return top
        scores_NE = args[0]
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))
