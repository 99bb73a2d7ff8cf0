"""Real transformers models of some ten thousand random weights, and how exactly they are sampled."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from sparse_rl import KV, Engine, Sampling, replay

ARCHITECTURES = {
    "llama": LlamaConfig(num_key_value_heads=4),  # multi-head
    "qwen2": Qwen2Config(num_key_value_heads=2),  # grouped, with biases
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=24),  # normalised queries and keys, a head dimension of its own
    "mistral": MistralConfig(num_key_value_heads=1, sliding_window=None),  # multi-query
}


def random_model(name, *, vocab=61, seed=0):
    config = ARCHITECTURES[name]
    config.update(
        {
            "vocab_size": vocab,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 8192,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "pad_token_id": 0,
        }
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # fresh weights attend almost evenly, which would hide what eviction does
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def noise_early_and_late(model, *, samples, tokens):
    """Mean distance of sampler and replay in tokens 100 to 200 and in the last third of the rollouts.

    The log-probs of a random model are alike at every length, so the two differ only where noise gathers. Over the first
    hundred tokens the noise rises by up to a third, as the kept positions spread; from there it must stay level."""
    engine = Engine(model, KV(policy="rkv", budget=32, interval=8, window=4, sinks=2, protect_prompt=False), slots=samples)
    rollouts = engine.generate([[7, 8, 9]], samples, Sampling(max_tokens=tokens, stop=()))
    with torch.no_grad():
        replayed = replay(model, rollouts, "sparse")
    noise = torch.stack([(ours.cpu() - rollout.logprobs).abs() for ours, rollout in zip(replayed, rollouts, strict=True)])
    return float(noise[:, 100:200].mean()), float(noise[:, -tokens // 3 :].mean())
