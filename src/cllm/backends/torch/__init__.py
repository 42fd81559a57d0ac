"""The PyTorch backend: serves checkpoints in the form in which training writes them."""
