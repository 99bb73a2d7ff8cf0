"""The learner: log-probs under the dense and the sampler's view, corrections, losses, updates."""
