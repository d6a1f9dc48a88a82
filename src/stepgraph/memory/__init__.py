"""Which forward values are kept for the backward."""
