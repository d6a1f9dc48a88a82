"""How values may be placed together, beyond what DTensor says of an operator."""
