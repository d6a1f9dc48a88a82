"""A step as CUDA graphs: what keeps it from being one, and what captures and replays."""
