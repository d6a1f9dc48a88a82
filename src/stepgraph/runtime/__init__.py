"""State, batches, ranks and recompilation accounting of a run."""
