"""How a Program executes."""
