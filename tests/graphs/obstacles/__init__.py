"""One module for each kind of obstacle: code that has it, and what is said."""
