"""Random models of a few thousand weights, of any family."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_weights(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model with large weights. Fresh ones attend almost evenly, which would hide a wrong mask, state or eviction."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                parameter.normal_()
            else:
                parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.to(dtype)


def covering(left: Iterable[Any], right: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs that contain every value of both, for tests of two properties that do not meet in the code."""
    one, other = list(left), list(right)
    longest = max(len(one), len(other))
    return [(one[number % len(one)], other[number % len(other)]) for number in range(longest)]
