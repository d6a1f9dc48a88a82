"""Passes that carry out a schedule decision."""
