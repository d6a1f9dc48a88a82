"""``auto``: the placement that costs least."""
