"""Passes that carry out a memory decision."""
