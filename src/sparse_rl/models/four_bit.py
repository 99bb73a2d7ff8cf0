"""Linear layers in 4 bits (NF4, bitsandbytes), for LoRA on a GPU that cannot hold them in 16 bits.

The weights of a layer are codes, an 8-bit scale per block of 64, and a float32 scale per 256 blocks (double quantization). They
are expanded for every product. Adapters cannot be merged into codes without rounding, so sampler and learner both run the layer
and its adapter, from the same codes. Embeddings, norms and the LM head keep their dtype.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from .compile import layer_list


def quantize_layers(model: PreTrainedModel) -> None:
    """Replace the linear layers of the decoder by 4-bit ones. They are quantized when the model moves to its device."""
    layers = layer_list(model)
    assert layers is not None, "the model was accepted without decoder layers"
    linears = [module for _, module in _linears(layers)]
    held = sum(linear.weight.numel() for linear in linears)
    total = sum(weight.numel() for weight in layers.parameters())
    if held < total / 2:
        raise UserError(
            f"model.lora.base = 4bit cannot store {model.config.model_type}: only {held / total:.0%} of its layers' weights are in "
            "linear layers. Set model.lora.base = auto."
        )
    for layer in layers:
        replace_linears(layer)
    model.is_loaded_in_4bit = True  # peft looks for it to adapt 4-bit layers


def replace_linears(layer: nn.Module) -> None:
    """Replace the linear layers inside a module by 4-bit ones, which are not quantized yet."""
    four_bit = _layer_class()
    for name, linear in _linears(layer):
        dtype, has_bias = linear.weight.dtype, linear.bias is not None
        made = four_bit(
            linear.in_features, linear.out_features, has_bias, compute_dtype=dtype, quant_type="nf4", device="meta"
        )
        made.weight = type(made.weight)(linear.weight.detach(), quant_type="nf4", module=made)
        made.bias = linear.bias
        made.support_avx512bf16_for_cpu = False  # it would repack weights in place, for products without a gradient
        layer.set_submodule(name, made)


def _linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers except those of adapters."""
    return [(name, each) for name, each in module.named_modules() if type(each) is nn.Linear and ".lora_" not in f".{name}"]


def compute_in_float32(model: nn.Module) -> None:
    """Set the model's 4-bit layers to compute in float32."""
    for module in model.modules():
        if "compute_dtype" in vars(module):
            vars(module)["compute_dtype"] = torch.float32


def is_four_bit(model: nn.Module) -> bool:
    return bool(getattr(model, "is_loaded_in_4bit", False))


def weight_count(model: nn.Module) -> int:
    """Return the number of the model's weights. Codes hold two weights per byte."""
    states = ((weight, getattr(weight, "quant_state", None)) for weight in model.parameters())
    return sum(weight.numel() if state is None else math.prod(state.shape) for weight, state in states)


def _layer_class() -> Any:
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError as error:
        raise UserError("model.lora.base = 4bit needs bitsandbytes: pip install 'sparse-rl[4bit]'.") from error
    return Linear4bit
