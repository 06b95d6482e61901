"""Requests of a file, answered into another: OpenAI's batches."""
