"""What is known of an operator."""
