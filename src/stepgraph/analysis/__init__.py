"""Facts read off a Program."""
