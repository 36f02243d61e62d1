"""Training of policies: steps and updates, safe checkpoints, and success on episodes kept apart."""
