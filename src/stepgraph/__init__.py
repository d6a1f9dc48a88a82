"""stepgraph compiles a PyTorch training step."""
