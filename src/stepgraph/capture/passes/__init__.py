"""Passes on what was captured, before anything is decided."""
