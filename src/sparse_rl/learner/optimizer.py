"""AdamW over float32 master weights for a model of any dtype, with a learning rate schedule and gradient clipping.

Gradients of half-precision weights are accumulated in float32 on the device of the weights, so the result does not depend on how
a batch is split. With `state = "offload"`, masters and moments are in page-locked host memory: each update copies the gradients
there and the new weights back.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import OptimizerConfig
from ..errors import UserError
from ..gpu_memory import page_lock
from ..models.compile import decoder_layers


class Optimizer:
    def __init__(self, model: nn.Module, settings: OptimizerConfig, steps: int, *, checkpointed_layers: int | None = None):
        """Set up the optimizer. By default all layers are checkpointed if `gradient_checkpointing` is True, else none."""
        self.settings, self.steps = settings, steps
        if checkpointed_layers is None:
            checkpointed_layers = len(decoder_layers(model)) if settings.gradient_checkpointing is True else 0
        self.checkpointed_layers = checkpointed_layers
        """Number of first layers that recompute their activations in the backward pass."""
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.names, self.params = list(named), list(named.values())
        if not self.params:
            raise UserError("The model has no trainable weights: set requires_grad for at least one parameter.")
        self.masters = [self._master(param) for param in self.params]
        self.collectors = [self._collector(param, master) for param, master in zip(self.params, self.masters, strict=True)]
        """Tensors whose `grad` accumulates the gradients of an update: the masters, or stand-ins where these are offloaded."""
        self._host_grads: dict[int, Tensor] = {}
        decayed = [master for master in self.masters if master.dim() > 1]
        plain = [master for master in self.masters if master.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = self._adamw([group for group in groups if group["params"]])

    def _master(self, param: nn.Parameter) -> nn.Parameter:
        """Return the float32 master weight of a parameter: the parameter itself if it is float32, else a copy that accumulates
        its gradients."""
        device = torch.device("cpu") if self.settings.state == "offload" else param.device
        if param.dtype in (torch.float32, torch.float64) and device == param.device:
            return param
        master = nn.Parameter(param.detach().to(device, torch.float32, copy=True))
        if param.is_cuda and not master.is_cuda:
            page_lock(master)
        return master

    def _collector(self, param: nn.Parameter, master: nn.Parameter) -> nn.Parameter:
        """Return the tensor that accumulates the gradient of a parameter, and hook the parameter to add to it."""
        if param is master:
            return master
        offloaded = self.settings.state == "offload"
        # a stand-in on the parameter's device has its shape, but only one element of memory
        collector = nn.Parameter(torch.zeros((), device=param.device).expand(param.shape)) if offloaded else master

        def collect(param: Tensor) -> None:
            assert param.grad is not None
            if collector.grad is None:
                collector.grad = param.grad.to(torch.float32)
            else:
                collector.grad.add_(param.grad)  # in float32
            param.grad = None

        param.register_post_accumulate_grad_hook(collect)
        return collector

    def _adamw(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {
            "lr": self.settings.lr,
            "betas": self.settings.betas,
            "weight_decay": self.settings.weight_decay,
        }
        if self.settings.state != "8bit":
            return torch.optim.AdamW(groups, fused=True, **options)
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError("optimizer.state = 8bit needs torchao: pip install 'sparse-rl[8bit]'.") from error
        return AdamW8bit(groups, **options)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. The linear and the cosine schedule end at 0 after the last step."""
        settings = self.settings
        if step < settings.warmup_steps:
            return settings.lr * (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return settings.lr
        progress = min(1.0, (step - settings.warmup_steps) / max(1, self.steps - settings.warmup_steps))
        if settings.schedule == "linear":
            return settings.lr * (1 - progress)
        return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the collected gradients by a factor."""
        torch._foreach_mul_([collector.grad for collector in self.collectors if collector.grad is not None], factor)

    def update(self, step: int) -> float | None:
        """Run one AdamW update with the accumulated gradients and return the gradient norm.

        If the norm is not finite, skip the update and return None.
        """
        grads = [collector.grad for collector in self.collectors if collector.grad is not None]
        total = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            self.clear()
            return None
        if norm > self.settings.clip_norm:
            nn.utils.clip_grads_with_norm_(self.collectors, self.settings.clip_norm, torch.tensor(norm))
        del grads
        self._offload_gradients()
        for group in self.adamw.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao keeps the learning rate on the device
                group["lr"].fill_(self.lr_at(step))
            else:
                group["lr"] = self.lr_at(step)
        self.adamw.step()
        self.clear()
        self._write_back()
        return norm

    def _offload_gradients(self) -> None:
        """Move the gradients to the offloaded masters."""
        gpu = None
        for index, (collector, master) in enumerate(zip(self.collectors, self.masters, strict=True)):
            if collector is master or collector.grad is None:
                continue
            if index not in self._host_grads:
                self._host_grads[index] = torch.empty_like(master.detach())
                if collector.is_cuda:
                    page_lock(self._host_grads[index])
            gpu = collector.device if collector.is_cuda else None
            self._host_grads[index].copy_(collector.grad, non_blocking=True)
            master.grad, collector.grad = self._host_grads[index], None
        if gpu is not None:
            torch.cuda.synchronize(gpu)

    def allocate(self) -> None:
        """Allocate the optimizer moments now instead of in the first update. The step count stays 0."""
        # also after updates, in which some weights may get no gradient
        missing = [master for master in self.masters if not self.adamw.state.get(master)]
        if not missing:
            return
        self.clear()
        for master in missing:
            master.grad = torch.zeros_like(master)
        for group in self.adamw.param_groups:
            group["lr"] = group["lr"] * 0
        self.adamw.step()  # with zero gradients and a zero learning rate, only the step count changes
        for master in missing:
            self.adamw.state[master]["step"].zero_()
        self.clear()

    def clear(self) -> None:
        for weight in (*self.masters, *self.collectors, *self.params):
            weight.grad = None

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = [(param, master) for param, master in zip(self.params, self.masters, strict=True) if param is not master]
        if pairs and pairs[0][0].device != pairs[0][1].device:
            for param, master in pairs:
                param.copy_(master.to(param.device, non_blocking=True))  # the dtype changes on the GPU
        elif pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(params, masters)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Master weights by parameter name, not copied."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    @property
    def moments(self) -> dict[str, Any]:
        """AdamW state of each weight by parameter name, not copied."""
        self.allocate()
        return {name: self.adamw.state[master] for name, master in zip(self.names, self.masters, strict=True)}

    def after_load(self) -> None:
        """Copy the master weights to the model after a checkpoint was loaded into them."""
        self._write_back()


@contextmanager
def checkpointed(model: nn.Module, layers: int) -> Iterator[None]:
    """Enable gradient checkpointing of the first `layers` layers inside the block.

    The first layers are the last in the backward pass: when they recompute, the others have freed their activations. Only
    checkpointed layers are set to training mode. Dropout stays off, so that the log-probs match the sampler's.
    """
    if not layers:
        yield
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{type(model).__name__} does not support gradient checkpointing: set optimizer.gradient_checkpointing to false."
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    # transformers lets embeddings require gradients for reentrant checkpointing, and does not undo it
    model.disable_input_require_grads()  # type: ignore[operator]
    for layer in decoder_layers(model)[layers:]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    chosen = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    before = [module.training for module in chosen]
    for module in chosen:
        module.training = True
    try:
        yield
    finally:
        for module, training in zip(chosen, before, strict=True):
            module.training = training
        model.gradient_checkpointing_disable()  # type: ignore[operator]
