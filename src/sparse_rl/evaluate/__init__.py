"""Evaluate a model on held-out problems, with a dense and with a compressed cache."""
