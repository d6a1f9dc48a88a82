"""What inductor is told, and what is done so that a graph with writes in its midst is right."""
