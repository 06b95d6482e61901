"""Output text to reasoning, content and tool calls, as it comes: one file a format, and a registry of their names."""
