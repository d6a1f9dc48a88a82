"""``budget:SIZE`` and ``auto``: what is kept within so many bytes takes least time to make up for."""
