"""The Program: graph, roles, names, invariants, text."""
