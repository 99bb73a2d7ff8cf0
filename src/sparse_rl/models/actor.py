"""The actor: the trained weights and the weights that sample.

Without LoRA on one rank, both are the same model. With LoRA they are a base model with adapters and a merged model. On several
ranks they are a sharded learner and a full model on each rank.

Merged weights are W + s·BA, computed in float32 and rounded once. They are written in place, so objects that reference their
storage, such as CUDA graphs, stay valid. By default the merged model has its own tensors in the adapted layers. With
`model.lora.merge = false`, it shares the learner's to save memory: `merge` writes W + s·BA into them for sampling, and `restore`
copies W back from host memory for learning, to the bit. A base in 4 bits is not merged: the learner samples.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import LoraConfig, RanksConfig
from ..errors import UserError, first_line
from ..gpu_memory import page_lock
from .four_bit import is_four_bit
from .recurrent import MAMBA, MIXERS

ADAPTER = "default"
LINEAR = ("Linear", "Linear4bit")
"""Names of linear layer classes. Routers may be subclasses."""
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Actor:
    def __init__(
        self, model: PreTrainedModel, lora: LoraConfig, *, keep_reference: bool = False, ranks: RanksConfig | None = None
    ):
        """Take over the model. `keep_reference` keeps the initial policy: at no cost with LoRA, else as a frozen copy."""
        self.learner = model
        self.sampler = model
        self.peft = None
        self.frozen: PreTrainedModel | None = None
        self.base: dict[str, Tensor] = {}
        """Base weights of the adapted layers in host memory, if the learner and the sampler share their tensors."""
        self.is_merged = False
        if is_four_bit(model):  # sampled with its adapters
            self.peft = _with_adapters(model, lora)
        elif lora.rank:
            shared = copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})
            self.peft = _with_adapters(model, lora)
            self.sampler = shared
            if not lora.merge:
                self._refuse_tied(lora)
                self.base = {name: _on_host(layer.get_base_layer().weight) for name, layer in self._adapted()}
            else:
                for name, _ in self._adapted():
                    layer = shared.get_submodule(name)
                    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
                self.sync()
        elif ranks is not None and ranks.count > 1:
            from .sharded import shard

            self.learner = shard(model, hold_gradients=ranks.hold_gradients)
            self.frozen = shard(model, trains=False) if keep_reference else None
            model.requires_grad_(False)
        elif keep_reference:
            self.frozen = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the trained weights to the sampler. Call it after every update. Do nothing if both are the same model."""
        if self.sampler is self.learner or self.base:
            return
        if self.peft is None:
            from .sharded import copy_whole

            copy_whole(self.learner, self.sampler)
            return
        self._write_merged()

    def _write_merged(self) -> None:
        for name, layer in self._adapted():
            base = layer.get_base_layer().weight
            merged = base.float() + layer.get_delta_weight(ADAPTER).float()
            self.sampler.get_submodule(name).weight.copy_(merged)

    def _refuse_tied(self, lora: LoraConfig) -> None:
        """Raise UserError if an adapted weight is used elsewhere too: merging it in place would change both places."""
        uses = Counter(id(weight) for _, weight in self.learner.named_parameters(remove_duplicate=False))
        if any(uses[id(layer.get_base_layer().weight)] > 1 for _, layer in self._adapted()):
            raise UserError(
                f"model.lora.merge = false cannot adapt tied weights (model.lora.targets = {lora.targets}): omit embed_tokens "
                "and lm_head from the targets, or set model.lora.merge = true."
            )

    @torch.no_grad()
    def merge(self) -> None:
        """Prepare to sample: merge the adapters into shared tensors. Do nothing if the sampler has its own."""
        if self.base and not self.is_merged:
            self.is_merged = True  # first: an interrupted merge must be restored, never merged again
            self._write_merged()

    @torch.no_grad()
    def restore(self) -> None:
        """Prepare to learn: copy the base weights back into shared tensors."""
        if self.is_merged:
            for name, layer in self._adapted():
                layer.get_base_layer().weight.copy_(self.base[name], non_blocking=True)
            self.is_merged = False

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.learner.named_modules():
            if hasattr(module, "get_delta_weight"):
                yield name, module

    @contextlib.contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Yield the initial policy."""
        if self.peft is not None:
            with self.peft.disable_adapter():
                yield self.learner
        else:
            assert self.frozen is not None, "this actor has no reference model: build it with keep_reference=True"
            yield self.frozen


def _on_host(weight: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked if it can be."""
    if weight.is_meta:  # a model without weights, for the plan
        return weight.detach()
    copied = weight.detach().to("cpu", copy=True)
    if weight.is_cuda:
        page_lock(copied)
    return copied


def _with_adapters(model: PreTrainedModel, lora: LoraConfig):
    from peft import LoraConfig, get_peft_model

    targets = linear_names(model) if lora.targets == "all-linear" else [name.strip() for name in lora.targets.split(",")]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        target_modules=targets,
        lora_dropout=0.0,  # with dropout, the learner's policy would differ from the sampler's
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        reason = f"model.lora.targets = {lora.targets!r} matches no layer of the model"
        if "not found in the base model" not in str(error):
            reason = f"model.lora.targets = {lora.targets!r} cannot be adapted ({first_line(error)})"
        raise UserError(f"{reason}: try all-linear.") from error
    if any(hasattr(module, "parameter_name") for module in adapted.modules()):
        raise UserError(
            f"model.lora.targets = {lora.targets!r} adapts the experts of {type(model).__name__}, whose weights cannot be "
            "merged: set model.lora.targets = q_proj,k_proj,v_proj,o_proj."
        )
    return adapted


def linear_names(model: PreTrainedModel) -> str | list[str]:
    """Return peft's targets for all-linear.

    In two cases, name every linear layer of the decoder: if layers have stacked experts or convolutions, because peft would also
    adapt experts and routers, and if the model is multimodal, because its image layers never run. Two kinds of layers get no
    adapter: gate, up and down projections in a model with experts, which peft takes for experts, and output projections of Mamba
    layers, whose kernels read the weight without calling the layer.
    """
    decoder = set(model.get_decoder().modules())
    outside = [module for module in model.modules() if module not in decoder and module is not model.get_output_embeddings()]
    multimodal = any(type(module).__name__ in LINEAR for module in outside)
    if not multimodal and not any(weight.dim() == 3 for weight in model.parameters()):
        return "all-linear"
    modules = dict(model.named_modules())
    has_experts = any(path.endswith(".experts") for path in modules)
    mamba = {path for path, module in modules.items() if MIXERS.get(type(module).__name__) == MAMBA}
    found = []
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        taken_for_experts = has_experts and name in EXPERT_PROJECTIONS
        read_by_kernel = name == "out_proj" and parent in mamba
        if type(module).__name__ in LINEAR and module in decoder and not taken_for_experts and not read_by_kernel:
            found.append(path)
    return found
