"""The decisions as data."""
