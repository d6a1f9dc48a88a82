"""Reports from plain data."""
