"""Passes that carry out a placement decision."""
