"""Where every tensor lives."""
