"""The HTTP API: OpenAI's completions and chat completions, and what runs a server: models, health, metrics."""
