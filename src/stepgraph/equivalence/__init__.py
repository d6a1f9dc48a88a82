"""A Program before and after a pass, all ranks in one process."""
