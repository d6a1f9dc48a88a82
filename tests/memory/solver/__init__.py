"""Tests of what searches for what is kept within a budget."""
