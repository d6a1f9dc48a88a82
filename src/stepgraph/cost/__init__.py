"""What a Program costs: memory over time."""
