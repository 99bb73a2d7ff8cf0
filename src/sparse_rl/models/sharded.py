"""A learner sharded over ranks with FSDP2, next to the full model from which each rank samples.

Weights are float32 and sharded over all ranks. They are gathered layer by layer in the model's dtype. Forward passes go
through `with_weights`, which also gathers the weights outside the layers (embedding, last norm, LM head).
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .compile import decoder_layers
from .support import copy_support


class _Root(nn.Module):
    """Module whose forward calls a function of the model, so that FSDP gathers the root's weights."""

    def __init__(self, model: PreTrainedModel, hold_gradients: bool):
        super().__init__()
        self.model, self.hold_gradients = model, hold_gradients

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


def _root_of(model: nn.Module) -> _Root | None:
    return model.__dict__.get("sharded_root")


def shard(model: PreTrainedModel, *, trains: bool = True, hold_gradients: bool = True) -> PreTrainedModel:
    """Return a sharded copy of the model. The original stays whole and is only used for sampling.

    With `hold_gradients`, each rank accumulates unsharded gradients over micro-batches, and they are summed over ranks once,
    at the last micro-batch.
    """
    half = model.dtype if model.dtype in (torch.bfloat16, torch.float16) else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    empty = {id(weight): _meta(weight, trains) for weight in model.parameters()}
    sharded = copy.deepcopy(model, empty | {id(buffer): buffer for buffer in model.buffers()})
    buffers = [(module, name, buffer) for module in sharded.modules() for name, buffer in module._buffers.items()]
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in decoder_layers(sharded):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    root = _Root(sharded, hold_gradients)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root.to_empty(device=model.device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    whole = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in sharded.named_parameters():
            part = weight.to_local()
            if part.numel():
                part.copy_(whole[name].chunk(dist.get_world_size())[dist.get_rank()])
    sharded.__dict__["sharded_root"] = root  # set in __dict__: nn.Module would register it as a submodule of itself
    copy_support(sharded, model)
    return sharded


def _meta(weight: nn.Parameter, trains: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, dtype=torch.float32, device="meta"), requires_grad=trains)


def is_sharded(model: nn.Module) -> bool:
    return _root_of(model) is not None


def with_weights(model: PreTrainedModel, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(model, *args)`, called with the weights outside the layers gathered."""
    root = _root_of(model)
    return function(model, *args) if root is None else root(function, *args)


def release_weights(model: PreTrainedModel) -> None:
    """Free the gathered weights outside the layers after passes without backward. They are gathered again when needed."""
    root = _root_of(model)
    if isinstance(root, FSDPModule):
        root.reshard()
        if hasattr(root, "reset_iter_state"):  # torch 2.13: state kept for a backward pass that does not follow
            root.reset_iter_state()


def sum_over_ranks(model: PreTrainedModel, *, now: bool) -> int:
    """Set whether the next backward sums gradients over ranks or accumulates them for a later sum.

    Return the factor by which to multiply the loss, because FSDP averages over ranks.
    """
    root = _root_of(model)
    if root is None:
        return 1
    root.set_requires_gradient_sync(now or not root.hold_gradients)  # type: ignore[operator]
    return dist.get_world_size()


@torch.no_grad()
def copy_whole(sharded: PreTrainedModel, into: PreTrainedModel) -> None:
    """Copy the sharded weights into a full model in place and layer by layer, so that no second full model is in memory."""
    target = dict(into.named_parameters())
    for prefix, module in _gathered(sharded):
        for name, weight in module.named_parameters():
            if not isinstance(weight, DTensor):
                target[prefix + name].copy_(weight)


def _gathered(sharded: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    names = {module: name for name, module in sharded.named_modules()}
    for unit, module in [(layer, layer) for layer in decoder_layers(sharded)] + [(_root_of(sharded), sharded)]:
        assert isinstance(unit, FSDPModule)
        unit.unshard()
        yield f"{names[module]}." if names[module] else "", module
        unit.reshard()
