"""Structured output: grammars and their checker, reasoning, tags."""
