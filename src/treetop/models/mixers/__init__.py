"""What a layer mixes tokens by, beside attention: a recurrence a file, and both side by side."""
