"""What changes a running engine: other weights, sleep."""
