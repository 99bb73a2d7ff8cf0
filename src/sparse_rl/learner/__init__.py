"""The learner: log-probs under the dense and the sparse view, corrections, losses and updates."""
