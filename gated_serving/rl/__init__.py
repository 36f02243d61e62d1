"""Goal-reaching policies by contrastive reinforcement learning, up to 1,024 layers deep (arXiv 2503.14858)."""
