"""Training of language models: recipes are read, documents packed, transformers' Trainer run, checkpoints made safe."""
