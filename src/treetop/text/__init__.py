"""Text to ids and back: tokenizer, chat templates, stop strings."""
