"""A module becomes a Program."""
