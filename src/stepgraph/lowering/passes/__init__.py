"""Passes that make a Program one rank's own, and executable."""
