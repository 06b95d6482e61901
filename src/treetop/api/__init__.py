"""The HTTP APIs: OpenAI's completions, chats and responses, Anthropic's messages, and what operators ask."""
