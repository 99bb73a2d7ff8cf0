"""The sampler: prompts in, rollouts out, through slots of a bounded KV cache."""
