"""Where text lives: tokenizer, stop strings, and the offline `LLM`."""
