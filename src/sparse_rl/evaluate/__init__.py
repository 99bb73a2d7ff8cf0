"""How good a model is on held-out problems, dense and under compression."""
