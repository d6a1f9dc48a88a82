"""The doors: Engine, check, the command line."""
