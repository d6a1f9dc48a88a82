"""When each collective runs, and when gradients become updates."""
