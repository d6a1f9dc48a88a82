"""The named placements, each a walk along a mesh dimension."""
