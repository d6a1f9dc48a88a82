"""Checkpoints: what is saved, in which files, and how one knows that all of it is there."""
