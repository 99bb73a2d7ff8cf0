"""Random-weight models by shape. Speed and memory do not depend on the values of the weights. Imports no torch."""

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {  # SmolLM2-135M
        "architecture": "Llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "0.5B": {  # Qwen2.5-0.5B
        "architecture": "Qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "1B": {  # Llama-3.2-1B
        "architecture": "Llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "1.5B": {  # Qwen2.5-1.5B
        "architecture": "Qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "3B": {  # Qwen2.5-3B
        "architecture": "Qwen2",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "4B": {  # Qwen3-4B
        "architecture": "Qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "7B": {  # Qwen2.5-7B
        "architecture": "Qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "8B": {  # Qwen3-8B
        "architecture": "Qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "14B": {  # Qwen2.5-14B
        "architecture": "Qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "32B": {  # Qwen2.5-32B
        "architecture": "Qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "72B": {  # Qwen2.5-72B
        "architecture": "Qwen2",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}


def random_model(shape: str, *, dtype, device: str, seed: int, base: str = "auto"):
    """Return a causal language model of this shape, with random weights from `seed`. `base` is `model.lora.base`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    fields = dict(SHAPES[shape])
    config_class = {"Llama": LlamaConfig, "Qwen2": Qwen2Config, "Qwen3": Qwen3Config}[fields.pop("architecture")]
    config = config_class(**fields)
    torch.manual_seed(seed)
    if base == "auto":
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    from .four_bit import replace_linears

    with torch.device(device):  # layer by layer: together, they would not fit in 16 bits
        model = AutoModelForCausalLM.from_config(config_class(**fields | {"num_hidden_layers": 1}), dtype=dtype)
        kind = type(model.model.layers.pop(0))
        config._attn_implementation = model.config._attn_implementation
        model.config = model.model.config = config
        for index in range(config.num_hidden_layers):
            layer = kind(config, index).to(dtype)
            layer.apply(model._init_weights)
            replace_linears(layer)
            model.model.layers.append(layer.to(device))
    model.is_loaded_in_4bit = True
    return model.eval()
