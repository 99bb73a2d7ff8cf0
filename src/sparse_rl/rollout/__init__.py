"""The sampler: samples rollouts for prompts in the slots of a bounded KV cache."""
