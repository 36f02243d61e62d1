"""Gated language models: architectures, checkpoints, training and serving."""
