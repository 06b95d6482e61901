"""Guards shown alive: named faults, the visibility decoder, a small random model with two KV groups."""
