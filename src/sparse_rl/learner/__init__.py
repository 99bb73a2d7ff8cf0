"""Who learns: log-probs under the learner's and the sampler's view, corrections, losses, updates."""
