"""Who samples: prompts in, rollouts out, through slots of a bounded cache."""
