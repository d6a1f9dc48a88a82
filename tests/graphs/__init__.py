"""A step as CUDA graphs, without a GPU."""
